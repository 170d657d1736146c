"""Whole lives of runs: real NATS, real SQLite, real gRPC; workers and ranks are simulated, and misbehave."""

from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from fixtures.coordinator_life import Agent, Fleet, Store, Worker, config_yaml, write_prompt_set
from fixtures.net import NatsServer

from specfleet.coordinator.app import Coordinator, Options

pytestmark = pytest.mark.integration


@pytest.fixture
async def coordinator(tmp_path: Path, nats_server: NatsServer) -> AsyncIterator[Coordinator]:
    found = Coordinator(Options("127.0.0.1:0", "127.0.0.1:0", nats_server.url, "", tmp_path / "coordinator"))
    await found.start()
    yield found
    await found.stop()


@pytest.fixture
async def fleet(coordinator: Coordinator, nats_server: NatsServer) -> Fleet:
    return Fleet(f"127.0.0.1:{coordinator.port}", nats_server.url, Store())


def check_model(fleet: Fleet, run_id: str, epochs: int, prompts: int, missing: set[tuple[int, int]] = frozenset()) -> None:
    """Every (epoch, prompt) is in the final model exactly once, except those that are missing for a reason."""
    seen = Counter(fleet.finals[run_id])
    expected = {(epoch, index) for epoch in range(epochs) for index in range(prompts)} - set(missing)
    assert seen == Counter(expected)


async def test_a_quiet_run_trains_every_prompt_once(fleet: Fleet, tmp_path: Path) -> None:
    prompts = write_prompt_set(tmp_path / "prompts", 30)
    worker, agent = Worker(fleet), Agent(fleet)
    worker.start()
    agent.start()
    yaml = config_yaml(tmp_path / "runs", prompts, trainer={"world": 1, "batch_size": 4, "epochs": 2})
    submitted = await fleet.submit("quiet", yaml, prompts)
    assert (submitted.state, submitted.total_steps, submitted.global_batch) == ("PREPARING", 15, 4)
    done = await fleet.finish("quiet")
    assert (done.state, done.trained_steps, done.checkpoint_step) == ("SUCCEEDED", 15, 15)
    assert done.tasks == {"SETTLED": 60}
    assert (done.in_flight_bytes, done.in_flight_samples) == (0, 0)
    assert fleet.store.objects == {}
    check_model(fleet, "quiet", 2, 30)
    verdict = await fleet.verify("quiet")
    assert verdict.conserved
    assert (verdict.trained_twice, verdict.trained_never, list(verdict.violations)) == (0, 0, [])
    await worker.kill()
    await agent.kill()
