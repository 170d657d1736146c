"""`specctl data capture` with real services: every prompt exactly once in the set, bit for bit, whatever dies."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from fixtures.feature_sets import capture_one, load_target
from fixtures.site import Site
from fixtures.stack import Specctl

from specfleet.features.feature_set import FeatureSet
from specfleet.wire import run_pb2

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

PROMPTS, WINDOW = 60, 4


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
def specctl(site: Site) -> Specctl:
    return Specctl(site.folder)


@pytest.fixture(scope="module")
def recipe(site: Site, tiny_target: Path) -> Path:
    rows = [
        {"id": str(n), "messages": [
            {"role": "user", "content": f"What is {n} and 4?"},
            {"role": "assistant", "content": f"The answer is {n + 4}. " + "Let me explain. " * (n % 7)},
        ]}
        for n in range(PROMPTS)
    ]  # fmt: skip
    (site.folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "model": {"target": str(tiny_target), "dtype": "float32"},
        "data": {"train": ["rows.jsonl"]},
        "strategy": {"draft_vocab_size": 0, "ttt_length": 2},
        # Two ranks and several epochs are for training; a recorder is one rank.
        "trainer": {"world": 2, "batch_size": WINDOW // 2, "epochs": 3, "device": "cpu", "dtype": "float32", "num_threads": 1},
        # One prompt per forward pass: padding could change the last bit of a state.
        "capture": {"max_batch_tokens": 1},
        "flow": {"high_samples": 16, "low_samples": 8},
    }  # fmt: skip
    path = site.folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def capture(specctl: Specctl, site: Site, out: str, *more: str) -> dict[str, object]:
    found = specctl.json("data", "capture", "recipe.yaml", "--out", out, "--coordinator", site.address, *more)
    assert isinstance(found, dict)
    return found


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


def check_ledger(site: Site, run_id: str, tasks: dict[str, int]) -> None:
    verdict = site.client.call(site.client.runs.VerifyLedger, run_pb2.VerifyLedgerRequest(run_id=run_id))
    assert (verdict.conserved, verdict.trained_twice, verdict.trained_never) == (True, 0, 0)
    assert list(verdict.violations) == []
    assert [dict(row.tasks) for row in verdict.rows] == [tasks]


@pytest.fixture(scope="module")
def recorded(specctl: Specctl, site: Site, recipe: Path) -> FeatureSet:
    done = specctl("data", "capture", recipe.name, "--out", "set", "--coordinator", site.address, "--shard-mb", "1")
    assert done.returncode == 0, done.stderr + done.stdout + site.logs("*")
    assert "trainer.world 2 is for training: one rank records" in done.stderr
    assert "the set is sound" in done.stdout
    return FeatureSet.open(site.folder / "set")


def test_a_set_holds_what_the_target_computes(
    specctl: Specctl, site: Site, recorded: FeatureSet, tiny_target: Path
) -> None:
    assert recorded.manifest.complete
    assert recorded.manifest.rows == PROMPTS
    check_contents(recorded, tiny_target)
    (run,) = specctl.json("run", "list", "--coordinator", site.address)["runs"]
    assert (run["state"], run["epochs"], run["global_batch"]) == ("SUCCEEDED", 1, WINDOW)
    check_ledger(site, run["run_id"], {"SETTLED": PROMPTS})


def test_a_complete_set_is_left_alone(specctl: Specctl, site: Site, recorded: FeatureSet) -> None:
    before = len(specctl.json("run", "list", "--coordinator", site.address)["runs"])
    found = capture(specctl, site, "set")
    assert (found["digest"], found["problems"], found["dead"]) == (recorded.digest, [], {})
    assert len(specctl.json("run", "list", "--coordinator", site.address)["runs"]) == before
