"""Runs that train from a feature set, on a real coordinator without any capture worker; ranks are simulated."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from fixtures.coordinator_life import CONTRACT, Agent, Fleet, config_yaml, write_prompt_set
from fixtures.feature_sets import write_feature_set
from sqlalchemy import func, select

from specfleet.contracts.errors import ContractError, DataError
from specfleet.coordinator.app import Coordinator
from specfleet.coordinator.ledger import tables
from specfleet.data.prompt_set import PromptSet
from specfleet.features.manifest import PROMPTS
from specfleet.features.writer import FeatureSetWriter
from specfleet.wire import run_pb2
from specfleet.wire.records_pb2 import CaptureContract

pytestmark = pytest.mark.integration

COUNT = 30


@pytest.fixture
def prompts(tmp_path: Path) -> PromptSet:
    return PromptSet.open(write_prompt_set(tmp_path / "prompts", COUNT))


def wider_contract(**changes: Any) -> CaptureContract:
    """Records more than CONTRACT asks for."""
    wider = CaptureContract()
    wider.CopyFrom(CONTRACT)
    wider.layers[:] = [0, 1, 2, 4]
    wider.extras[:] = ["teacher_argmax"]
    for name, value in changes.items():
        setattr(wider, name, value)
    return wider


def offline_yaml(tmp_path: Path, directory: Path, **sections: dict[str, Any]) -> str:
    data = {"source": "features", "features": str(directory), "prompt_set": "", "seed": 7}
    return config_yaml(tmp_path / "runs", directory / PROMPTS, data=data, **sections)


async def submit(fleet: Fleet, tmp_path: Path, directory: Path, **sections: dict[str, Any]) -> run_pb2.RunSnapshot:
    return await fleet.submit("offline", offline_yaml(tmp_path, directory, **sections), directory / PROMPTS)


async def test_a_run_needs_no_worker_and_survives_its_trainer(
    coordinator: Coordinator, fleet: Fleet, prompts: PromptSet, tmp_path: Path
) -> None:
    """Two ranks, killed between checkpoints and crashed once; one prompt of the set is dead."""
    directory = write_feature_set(tmp_path / "set", wider_contract(), prompts, dead={13: "NaN in aux_states"})
    agent = Agent(fleet, slots=2)
    agent.step_s, agent.crash_before = 0.02, {5}
    agent.start()
    sections = {
        "trainer": {"world": 2, "batch_size": 2, "epochs": 2},
        "flow": {"max_dead_fraction": 0.1, "high_samples": 12, "low_samples": 8},
    }
    submitted = await submit(fleet, tmp_path, directory, **sections)
    assert (submitted.state, submitted.total_steps) == ("PREPARING", 15)
    await fleet.wait_for("offline", lambda s: s.trained_steps >= 8)
    await agent.kill()
    agent.start()
    done = await fleet.finish("offline")
    await agent.kill()
    assert (done.state, done.tasks) == ("DEGRADED", {"SETTLED": 58, "DEAD": 2})
    assert done.generation >= 3
    assert (done.in_flight_bytes, done.in_flight_samples, done.captured_tokens) == (0, 0, 0)
    expected = {(epoch, index) for epoch in range(2) for index in range(COUNT) if index != 13}
    assert Counter(fleet.finals["offline"]) == Counter(expected)
    verdict = await fleet.verify("offline")
    assert (verdict.conserved, list(verdict.violations), verdict.outbox_open) == (True, [], 0)
    left = await coordinator.hub.ledger.read(
        lambda conn: conn.execute(select(func.count()).select_from(tables.samples)).scalar_one()
    )
    assert left == 0
    explained = await fleet.ask(
        "ExplainSample", run_pb2.ExplainSampleRequest(task={"run_id": "offline", "epoch": 1, "prompt_index": 13})
    )
    assert (explained.state, explained.reason) == ("DEAD", "NaN in aux_states")


async def test_the_order_is_that_of_an_online_run(fleet: Fleet, prompts: PromptSet, tmp_path: Path) -> None:
    from fixtures.coordinator_life import Worker

    directory = write_feature_set(tmp_path / "set", CONTRACT, prompts)
    agent, worker = Agent(fleet), Worker(fleet)
    agent.start()
    worker.start()
    sections = {"trainer": {"world": 1, "batch_size": 4, "epochs": 2}}
    await submit(fleet, tmp_path, directory, **sections)
    await fleet.submit("online", config_yaml(tmp_path / "runs", prompts.path, **sections), prompts.path)
    assert (await fleet.finish("offline")).state == (await fleet.finish("online")).state == "SUCCEEDED"
    await agent.kill()
    await worker.kill()
    assert fleet.finals["offline"] == fleet.finals["online"]
    assert len(fleet.finals["online"]) == 2 * COUNT


async def test_a_set_that_cannot_serve_the_run_is_refused_with_numbers(
    fleet: Fleet, prompts: PromptSet, tmp_path: Path
) -> None:
    narrow = wider_contract(final_state="none", weights_hash="x" * 64)
    narrow.layers[:] = [1, 3]
    directory = write_feature_set(tmp_path / "narrow", narrow, prompts)
    with pytest.raises(ContractError) as refused:
        await submit(fleet, tmp_path, directory)
    assert refused.value.code == "SF-RUN-FEATURES-CONTRACT"
    for gap in (
        f"weights_hash: recorded {'x' * 64}, wanted {'w' * 64}",
        "final_state: recorded none, wanted post_norm",
        "layers: recorded [1, 3], wanted [1, 2]",
    ):
        assert gap in refused.value.message

    directory = tmp_path / "begun"
    FeatureSetWriter.open(directory, CONTRACT, prompts).close()
    with pytest.raises(DataError, match=r"0 of 30 prompts are recorded, 0 are dead, 30 are missing"):
        await submit(fleet, tmp_path, directory)

    directory = write_feature_set(tmp_path / "dead", CONTRACT, prompts, dead={1: "short", 2: "short"})
    with pytest.raises(DataError, match=r"2 of 30 prompts are dead; flow.max_dead_fraction is 0.01"):
        await submit(fleet, tmp_path, directory)

    directory = write_feature_set(tmp_path / "good", CONTRACT, prompts)
    others = write_prompt_set(tmp_path / "others", COUNT, seed=1)
    with pytest.raises(DataError, match=f"recorded for prompt set {prompts.digest}, the run's is"):
        await fleet.submit("offline", offline_yaml(tmp_path, directory), others)
    with pytest.raises(DataError, match="is not the manifest of a feature set"):
        await fleet.submit("offline", offline_yaml(tmp_path, prompts.path), prompts.path)
    assert not (await fleet.ask("ListRuns", run_pb2.ListRunsRequest())).runs


async def test_a_set_that_changed_holds_the_run_until_it_is_back(
    coordinator: Coordinator, fleet: Fleet, prompts: PromptSet, tmp_path: Path
) -> None:
    directory = write_feature_set(tmp_path / "set", CONTRACT, prompts)
    await submit(fleet, tmp_path, directory)
    await fleet.wait_for("offline", lambda s: s.tasks.get("CAPTURED", 0) > 0)
    aside = directory.rename(tmp_path / "aside")
    coordinator.hub.features._sets.clear()  # as after a restart
    held = await fleet.wait_for("offline", lambda s: s.state == "PAUSED")
    assert "is not a feature set" in held.reason
    aside.rename(directory)
    await fleet.ask("ResumeRun", run_pb2.ResumeRunRequest(run_id="offline"))
    agent = Agent(fleet)
    agent.start()
    assert (await fleet.finish("offline")).state == "SUCCEEDED"
    await agent.kill()
