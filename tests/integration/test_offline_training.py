"""Training from a feature set, with a real coordinator and real trainers: the same losses as online, whatever dies."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.feature_sets import record_feature_set
from fixtures.site import Site
from safetensors.torch import load_file

from specfleet.config import RunConfig
from specfleet.ctl.submission import submission
from specfleet.data.prepare import prepare_prompt_set
from specfleet.data.prompt_set import PromptSet
from specfleet.features.feature_set import FeatureSet
from specfleet.target.facts import build_contract, read_target_facts
from specfleet.wire import run_pb2

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

PROMPTS, EPOCHS, BATCH = 40, 4, 4
STEPS = PROMPTS * EPOCHS // BATCH


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    site = Site(tmp_path_factory.mktemp("offline"))
    site.open()
    yield site
    site.close()


@pytest.fixture(scope="module")
def prompts(site: Site, tiny_target: Path) -> PromptSet:
    source = site.folder / "rows.jsonl"
    rows = [
        {"id": str(n), "messages": [
            {"role": "user", "content": f"What is {n} and 4?"},
            {"role": "assistant", "content": f"The answer is {n + 4}. " + "Let me explain. " * (n % 4)},
        ]}
        for n in range(PROMPTS)
    ]  # fmt: skip
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return prepare_prompt_set([source], tiny_target, site.folder / "sets")


def run_config(site: Site, target: Path, run_id: str, data: dict[str, Any]) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run_id": run_id,
            "model": {"target": str(target), "dtype": "float32"},
            "data": data,
            "strategy": {"draft_vocab_size": 0, "ttt_length": 2},
            "trainer": {
                "batch_size": BATCH, "epochs": EPOCHS, "lr": 1e-3, "device": "cpu", "dtype": "float32", "num_threads": 1,
            },
            # One prompt per forward pass, as the set is recorded: padding could change the last bit of a state.
            "capture": {"max_batch_tokens": 1},
            "flow": {"high_samples": 16, "low_samples": 8},
            "checkpoint": {"every_steps": 3, "keep": 100},
            "deployment": {"output_dir": str(site.folder / "runs")},
        }
    )  # fmt: skip


@pytest.fixture(scope="module")
def features(site: Site, prompts: PromptSet, tiny_target: Path) -> FeatureSet:
    config = run_config(site, tiny_target, "", {"prompt_set": str(prompts.path)})
    contract = build_contract(config, read_target_facts(tiny_target))
    return record_feature_set(site.folder / "features", contract, prompts, tiny_target)


def losses(site: Site, run_id: str) -> list[tuple[int, float, float]]:
    return [(line["step"], line["loss"], line["grad_norm"]) for line in site.metrics(run_id)]


def weights(site: Site, run_id: str) -> dict[str, torch.Tensor]:
    return load_file(site.folder / "runs" / run_id / "checkpoints" / f"step-{STEPS:08d}" / "draft.safetensors")


def check_sound(site: Site, run_id: str) -> None:
    verdict = site.client.call(site.client.runs.VerifyLedger, run_pb2.VerifyLedgerRequest(run_id=run_id))
    assert (verdict.conserved, verdict.trained_twice, verdict.trained_never) == (True, 0, 0)
    assert list(verdict.violations) == []
    assert [dict(row.tasks) for row in verdict.rows] == [{"SETTLED": PROMPTS}] * EPOCHS


@pytest.fixture(scope="module")
def online(site: Site, prompts: PromptSet, tiny_target: Path) -> list[tuple[int, float, float]]:
    """Losses of an online run that nothing disturbed. Its capture service is gone afterwards."""
    site.start_trainer()
    site.start_capture()
    site.submit(submission(run_config(site, tiny_target, "online", {"prompt_set": str(prompts.path)})))
    run = site.finish("online")
    assert (run.state, run.trained_steps, run.captured_tokens) == ("SUCCEEDED", STEPS, run.trained_tokens), run.reason
    site.kill("capture")
    found = losses(site, "online")
    assert found[-1][1] < found[0][1]
    return found


def test_a_damaged_shard_and_a_killed_trainer_leave_the_losses_of_an_online_run(
    site: Site, features: FeatureSet, tiny_target: Path, online: list[tuple[int, float, float]]
) -> None:
    victim = features.path / features.manifest.shards[-1].file
    whole = victim.read_bytes()
    victim.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    config = run_config(site, tiny_target, "offline", {"source": "features", "features": str(features.path)})
    site.submit(submission(config))
    run = site.wait_for("offline", lambda run: run.state == "PAUSED" and run.generation > 0)
    assert f"{victim}: " in run.reason
    assert "was altered" in run.reason
    assert "specctl run resume offline" in run.reason

    victim.write_bytes(whole)
    resumed = site.client.call(site.client.runs.ResumeRun, run_pb2.ResumeRunRequest(run_id="offline")).run
    first = resumed.trained_steps
    # Between two checkpoints, in the middle of an epoch.
    site.wait_for(
        "offline",
        lambda run: (
            run.trained_steps > first and run.trained_steps % 3 != 0 and run.trained_steps % (PROMPTS // BATCH) != 0
        ),
    )
    site.kill("trainer")
    site.start_trainer()

    run = site.finish("offline")
    assert (run.state, run.trained_steps, run.captured_tokens) == ("SUCCEEDED", STEPS, 0), run.reason
    assert run.generation == 3
    check_sound(site, "offline")
    assert losses(site, "offline") == online
    for name, tensor in weights(site, "online").items():
        assert torch.equal(tensor, weights(site, "offline")[name]), name
