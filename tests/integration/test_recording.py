"""`specctl data capture` with real services: every prompt exactly once in the set, bit for bit, whatever dies."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from fixtures.feature_sets import capture_one, load_target
from fixtures.site import OVER, Site
from fixtures.stack import Specctl
from fixtures.tiny import make_tiny_target, make_tiny_tokenizer
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from specfleet.contracts.errors import SpecfleetError
from specfleet.contracts.ids import task_key
from specfleet.ctl.app import app
from specfleet.features.feature_set import FeatureSet
from specfleet.wire import run_pb2

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

PROMPTS, WINDOW = 80, 4
# The prompt with a character that the target of one test cannot embed.
POISONED = 37
# Of 1 MiB each, the smallest that the command makes.
MIN_SHARDS = 3


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    site = Site(tmp_path_factory.mktemp("recording"))
    site.open()
    site.start_trainer()
    site.start_capture()
    site.client.call(site.client.runs.ListRuns, run_pb2.ListRunsRequest())  # waits until the coordinator serves
    yield site
    site.close()


@pytest.fixture(scope="module")
def recipe(site: Site, tiny_target: Path) -> Path:
    rows = [
        {"id": str(n), "messages": [
            {"role": "user", "content": f"What is {n} and 4{'Z' * (n == POISONED)}?"},
            {"role": "assistant", "content": f"The answer is {n + 4}. " + "Let me explain. " * (2 * n % 40)},
        ]}
        for n in range(PROMPTS)
    ]  # fmt: skip
    (site.folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "model": {"target": str(tiny_target), "dtype": "float32"},
        "data": {"train": [str(site.folder / "rows.jsonl")]},
        "strategy": {"draft_vocab_size": 0, "ttt_length": 2},
        # Two ranks and several epochs are for training; a recorder is one rank.
        "trainer": {"world": 2, "batch_size": WINDOW // 2, "epochs": 3, "device": "cpu", "dtype": "float32", "num_threads": 1},
        # One prompt per forward pass: padding could change the last bit of a state.
        "capture": {"max_batch_tokens": 1},
        "flow": {"high_samples": 16, "low_samples": 8, "lease_s": 10},
        "deployment": {"output_dir": str(site.folder / "runs")},
    }  # fmt: skip
    path = site.folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.fixture(scope="module")
def nan_target(site: Site) -> Path:
    """Its embedding of one character is NaN; a single prompt has that character."""
    path = make_tiny_target(site.folder / "nan-target", seed=1)
    weights = load_file(path / "model.safetensors")
    (poison,) = make_tiny_tokenizer().encode("Z", add_special_tokens=False)
    weights["model.embed_tokens.weight"][poison] = torch.nan
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


def command(site: Site, out: str, *more: str) -> list[str]:
    where = ["--out", str(site.folder / out), "--coordinator", site.address]
    return ["data", "capture", str(site.folder / "recipe.yaml"), *where, "--shard-mb", "1", *more]


def capture(site: Site, out: str, *more: str) -> Any:
    """The command in this process, whose libraries are loaded. Raises what it fails with."""
    done = CliRunner().invoke(app, [*command(site, out, *more), "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def begin(site: Site, out: str) -> str:
    """A recording whose first shard is settled and whose last is far; returns its run."""
    run_id = str(capture(site, out, "--no-follow")["run_id"])
    site.wait_for(run_id, lambda run: run.checkpoint_step > 0)
    return run_id


def check_contents(features: FeatureSet, target: Path) -> None:
    """Every prompt once, and its states those of the target, bit for bit."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model = load_target(target, features.manifest.contract)
    for prompt in features.prompts.read(range(len(features.prompts))):
        expected, found = capture_one(model, prompt), features.read(prompt.index)
        assert expected.keys() == found.keys()
        for name, tensor in expected.items():
            assert tensor.contiguous().view(torch.uint8).numpy().tobytes() == found[name].tobytes(), (
                prompt.index,
                name,
            )
    torch.set_num_threads(threads)


def tasks(site: Site, run_id: str) -> dict[str, int]:
    """Tasks per state, of a ledger that is sound."""
    verdict = site.client.call(site.client.runs.VerifyLedger, run_pb2.VerifyLedgerRequest(run_id=run_id))
    assert (verdict.conserved, verdict.trained_twice, verdict.trained_never) == (True, 0, 0)
    assert list(verdict.violations) == []
    (row,) = verdict.rows
    return dict(row.tasks)


@pytest.fixture(scope="module")
def recorded(site: Site, recipe: Path) -> FeatureSet:
    done = Specctl(site.folder)(*command(site, "set"))
    assert done.returncode == 0, done.stderr + done.stdout + site.logs("*")
    assert "trainer.world 2 is for training: one rank records" in done.stderr
    assert "the set is sound" in done.stdout
    return FeatureSet.open(site.folder / "set")


def test_a_set_holds_what_the_target_computes(site: Site, recorded: FeatureSet, tiny_target: Path) -> None:
    assert recorded.manifest.complete
    assert recorded.manifest.rows == PROMPTS
    assert len(recorded.manifest.shards) >= MIN_SHARDS
    check_contents(recorded, tiny_target)
    (run,) = site.client.call(site.client.runs.ListRuns, run_pb2.ListRunsRequest()).runs
    assert (run.state, run.epochs, run.global_batch) == ("SUCCEEDED", 1, WINDOW)
    assert tasks(site, run.run_id) == {"SETTLED": PROMPTS}

    again = capture(site, "set")
    assert (again["digest"], again["problems"], again["dead"]) == (recorded.digest, [], {})
    assert len(site.client.call(site.client.runs.ListRuns, run_pb2.ListRunsRequest()).runs) == 1


def test_an_offline_run_trains_from_it(site: Site, recorded: FeatureSet) -> None:
    overrides = ("data.source=features", f"data.features={recorded.path}", "trainer.world=1", "trainer.epochs=1")
    settings = [part for override in overrides for part in ("-s", override)]
    where = ["--run-id", "offline", "--coordinator", site.address]
    done = CliRunner().invoke(app, ["run", "submit", str(site.folder / "recipe.yaml"), *where, *settings, "--watch"])
    assert done.exit_code == 0, done.output + site.logs("offline")
    run = site.get("offline")
    assert (run.state, run.captured_tokens, run.trained_tokens) == ("SUCCEEDED", 0, recorded.manifest.tokens)


def test_a_killed_recorder_and_a_killed_capture_worker_lose_and_repeat_nothing(
    site: Site, recipe: Path, tiny_target: Path
) -> None:
    run_id = begin(site, "killed")
    site.kill("capture")
    site.kill("trainer")
    assert site.get(run_id).state not in OVER
    site.start_capture()
    site.start_trainer()
    found = capture(site, "killed")
    assert (found["rows"], found["missing"], found["problems"]) == (PROMPTS, 0, [])
    run = site.get(run_id)
    assert (run.state, run.generation) == ("SUCCEEDED", 2)
    assert tasks(site, run_id) == {"SETTLED": PROMPTS}
    features = FeatureSet.open(site.folder / "killed")
    check_contents(features, tiny_target)

    # What was settled before is captured no second time.
    with safe_open(features.path / features.manifest.shards[0].file, framework="pt") as shard:
        settled = shard.get_tensor("prompt_index").tolist()
    for index in settled:
        request = run_pb2.ExplainSampleRequest(task=task_key(run_id, 0, index))
        assert site.client.call(site.client.runs.ExplainSample, request).attempt == 1


def test_a_cancelled_recording_is_continued_by_another_run(site: Site, recipe: Path, tiny_target: Path) -> None:
    first = begin(site, "cancelled")
    site.client.call(site.client.runs.CancelRun, run_pb2.CancelRunRequest(run_id=first))
    had = FeatureSet.open(site.folder / "cancelled").manifest.rows
    assert 0 < had < PROMPTS
    assert capture(site, "cancelled")["problems"] == []
    second = tasks(site, first.removesuffix("-1") + "-2")
    # Its recorder writes down what it has before it leaves.
    assert had <= second["SKIPPED"] < PROMPTS
    assert second == {"SKIPPED": second["SKIPPED"], "SETTLED": PROMPTS - second["SKIPPED"]}
    check_contents(FeatureSet.open(site.folder / "cancelled"), tiny_target)


def test_a_prompt_that_cannot_be_captured_is_tried_again_or_dead_in_the_set(
    site: Site, recipe: Path, nan_target: Path
) -> None:
    """One prompt in eighty is more than flow.max_dead_fraction allows, until that is raised."""
    target = ("-s", f"model.target={nan_target}")
    with pytest.raises(SpecfleetError, match=r"SF-RECORD-OVER.*1 of 80 prompts are dead"):
        capture(site, "dead", *target)
    assert FeatureSet.open(site.folder / "dead").missing().tolist() == [POISONED]

    found = capture(site, "dead", *target, "-s", "flow.max_dead_fraction=0.05")
    assert (found["complete"], found["rows"], found["problems"]) == (True, PROMPTS - 1, [])
    assert list(found["dead"]) == [str(POISONED)]
    assert "NaN" in found["dead"][str(POISONED)]
