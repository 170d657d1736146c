"""Whole lives of runs: real NATS, real SQLite, real gRPC; workers and ranks are simulated, and misbehave."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from fixtures.coordinator_life import CONTRACT, PER_TOKEN, Agent, Fleet, Worker, config_yaml, write_prompt_set

from specfleet.contracts.errors import ConfigError, ContractError
from specfleet.coordinator.app import Coordinator
from specfleet.wire import records_pb2, run_pb2

pytestmark = pytest.mark.integration


def check_model(
    fleet: Fleet, run_id: str, epochs: int, prompts: int, missing: set[tuple[int, int]] = frozenset()
) -> None:
    """Every (epoch, prompt) is in the final model exactly once, except those that are missing for a reason."""
    seen = Counter(fleet.finals[run_id])
    expected = {(epoch, index) for epoch in range(epochs) for index in range(prompts)} - set(missing)
    assert seen == Counter(expected)


async def check_sound(fleet: Fleet, run_id: str) -> None:
    verdict = await fleet.verify(run_id)
    assert verdict.conserved
    assert (verdict.trained_twice, verdict.trained_never, list(verdict.violations)) == (0, 0, [])


async def until(condition: Callable[[], bool]) -> None:
    """Waits for something that only polling shows: simulated workers hear from the coordinator by their own heartbeat."""
    async with asyncio.timeout(15):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


@pytest.fixture
async def crew(fleet: Fleet) -> AsyncIterator[tuple[Worker, Agent]]:
    """One worker and one agent, running."""
    worker, agent = Worker(fleet), Agent(fleet)
    worker.start()
    agent.start()
    yield worker, agent
    await agent.kill()
    await worker.kill()


async def test_a_quiet_run_trains_every_prompt_once(fleet: Fleet, crew: tuple[Worker, Agent], tmp_path: Path) -> None:
    prompts = write_prompt_set(tmp_path / "prompts", 30)
    yaml = config_yaml(tmp_path / "runs", prompts, trainer={"world": 1, "batch_size": 4, "epochs": 2})
    submitted = await fleet.submit("quiet", yaml, prompts)
    assert (submitted.state, submitted.total_steps, submitted.global_batch) == ("PREPARING", 15, 4)
    again = await fleet.submit("quiet", yaml, prompts)
    assert again.submitted_at_unix_ms == submitted.submitted_at_unix_ms
    done = await fleet.finish("quiet")
    assert (done.state, done.trained_steps, done.checkpoint_step) == ("SUCCEEDED", 15, 15)
    assert done.tasks == {"SETTLED": 60}
    assert (done.in_flight_bytes, done.in_flight_samples) == (0, 0)
    assert fleet.store.objects == {}
    assert done.captured_tokens == done.trained_tokens > 0
    assert done.capture_rate > 0
    assert done.train_rate > 0
    assert done.wait_share == pytest.approx(1 / 3)
    assert done.metrics["loss"] == pytest.approx(1 / 15)
    check_model(fleet, "quiet", 2, 30)
    await check_sound(fleet, "quiet")


async def test_crashes_duplicates_and_stale_attempts(fleet: Fleet, tmp_path: Path) -> None:
    """Workers die with prompts in hand, publish twice, forget to publish, fail; the trainer is killed between checkpoints."""
    prompts = write_prompt_set(tmp_path / "prompts", 60)
    workers = [Worker(fleet, f"worker-{n}") for n in range(2)]
    agent = Agent(fleet, slots=2)
    agent.step_s = 0.02
    agent.crash_before = {5}
    for worker in workers:
        worker.duplicate, worker.infra, worker.forget, worker.delay_s = 0.2, 0.05, 0.03, 0.005
        worker.poisoned = {13}
        worker.start()
    agent.start()
    yaml = config_yaml(
        tmp_path / "runs",
        prompts,
        trainer={"world": 2, "batch_size": 2, "epochs": 2},
        flow={"lease_s": 1.0, "sample_budget": 2, "max_dead_fraction": 0.1},
    )
    await fleet.submit("rough", yaml, prompts)
    await fleet.wait_for("rough", lambda s: s.trained_steps >= 7)
    await workers[0].kill()
    workers[0].start()
    await fleet.wait_for("rough", lambda s: s.trained_steps >= 11)
    await agent.kill()
    agent.start()
    await workers[1].kill()
    done = await fleet.finish("rough", timeout_s=90)
    assert done.state == "DEGRADED"
    assert done.tasks == {"SETTLED": 118, "DEAD": 2}
    assert "2 of 120 prompts are dead" in done.reason
    assert done.generation >= 3
    check_model(fleet, "rough", 2, 60, {(0, 13), (1, 13)})
    await check_sound(fleet, "rough")
    assert fleet.store.objects == {}
    for process in (agent, workers[0]):
        await process.kill()


@pytest.mark.parametrize("order", ["deterministic", "arrival"])
async def test_lost_features_are_captured_again(
    fleet: Fleet, crew: tuple[Worker, Agent], tmp_path: Path, order: str
) -> None:
    prompts = write_prompt_set(tmp_path / "prompts", 40)
    _, agent = crew
    to_lose = {2: 1, 3: 4, 10: 2}

    def lose(step: int, keys: list[str]) -> None:
        for key in keys[:: len(keys) // 4][: to_lose.pop(step, 0)]:
            fleet.store.objects.pop(key, None)

    agent.lose = lose
    await fleet.submit("lossy", config_yaml(tmp_path / "runs", prompts, flow={"order": order}), prompts)
    done = await fleet.finish("lossy")
    assert (done.state, done.trained_steps, done.tasks) == ("SUCCEEDED", 10, {"SETTLED": 40})
    assert to_lose == {}
    assert done.generation == 1
    check_model(fleet, "lossy", 1, 40)
    await check_sound(fleet, "lossy")
    assert fleet.store.objects == {}


@pytest.mark.parametrize("retain", ["until_trained", "until_checkpoint"])
async def test_restore_repeats_only_what_no_checkpoint_holds(
    fleet: Fleet, crew: tuple[Worker, Agent], tmp_path: Path, retain: str
) -> None:
    """Marks are tight: after the restore, earlier prompts must win credits from samples captured for later windows."""
    prompts = write_prompt_set(tmp_path / "prompts", 48)
    _, agent = crew
    worker_samples = 24 if retain == "until_checkpoint" else 8
    agent.crash_before = {6}
    yaml = config_yaml(
        tmp_path / "runs",
        prompts,
        flow={"retain": retain, "high_samples": worker_samples, "low_samples": worker_samples},
    )
    await fleet.submit("restored", yaml, prompts)
    done = await fleet.finish("restored")
    assert (done.state, done.trained_steps, done.tasks) == ("SUCCEEDED", 12, {"SETTLED": 48})
    assert agent.history == [(1, 0), (2, 3)]
    check_model(fleet, "restored", 1, 48)
    await check_sound(fleet, "restored")
    # Recapture of steps 4 and 5 raised attempts, unless their features were kept.
    order = fleet.finals["restored"]
    attempts = [
        (await fleet.ask("ExplainSample", explain_request("restored", *order[n]))).attempt for n in range(12, 20)
    ]
    assert set(attempts) == ({1} if retain == "until_checkpoint" else {2})


def explain_request(run_id: str, epoch: int, index: int) -> run_pb2.ExplainSampleRequest:
    return run_pb2.ExplainSampleRequest(task=records_pb2.TaskKey(run_id=run_id, epoch=epoch, prompt_index=index))


async def test_order_does_not_depend_on_accidents(fleet: Fleet, crew: tuple[Worker, Agent], tmp_path: Path) -> None:
    """Deterministic order: the same windows with and without crashes, and explain tells the story of a sample."""
    prompts = write_prompt_set(tmp_path / "prompts", 24)
    yaml = config_yaml(tmp_path / "runs", prompts)
    worker, agent = crew
    await fleet.submit("calm", yaml, prompts)
    await fleet.finish("calm")
    agent.crash_before = {5}
    worker.duplicate = worker.infra = 0.2
    await fleet.submit("stormy", yaml, prompts)
    await fleet.finish("stormy")
    windows = [[set(fleet.finals[run][n : n + 4]) for n in range(0, 24, 4)] for run in ("calm", "stormy")]
    assert windows[0] == windows[1]
    told = await fleet.ask("ExplainSample", explain_request("calm", *fleet.finals["calm"][0]))
    assert told.state == "SETTLED"
    words = ["dispatched", "claimed by worker-1", "captured", "trained in step 1 of generation 1", "settled"]
    assert [word in line for word, line in zip(words, told.history, strict=True)] == [True] * 5


async def test_pause_resume_and_cancel(fleet: Fleet, crew: tuple[Worker, Agent], tmp_path: Path) -> None:
    prompts = write_prompt_set(tmp_path / "prompts", 80)
    yaml = config_yaml(tmp_path / "runs", prompts)
    _, agent = crew
    agent.step_s = 0.05
    await fleet.submit("paused", yaml, prompts)
    await fleet.wait_for("paused", lambda s: s.trained_steps >= 2)
    paused = (await fleet.ask("PauseRun", run_pb2.PauseRunRequest(run_id="paused"))).run
    assert (paused.state, paused.reason) == ("PAUSED", "paused by user")
    # The ranks write a checkpoint of what they have trained, and leave.
    held = await fleet.wait_for("paused", lambda s: s.checkpoint_step == s.trained_steps and agent.exits == [(0, "")])
    assert held.state == "PAUSED"
    other = config_yaml(tmp_path / "runs", prompts, strategy={"ttt_length": 5})
    with pytest.raises(ContractError, match=r"strategy.ttt_length: recorded 7, now 5"):
        await fleet.ask("ResumeRun", run_pb2.ResumeRunRequest(run_id="paused", config_yaml=other))
    await fleet.ask("ResumeRun", run_pb2.ResumeRunRequest(run_id="paused", config_yaml=yaml))
    await fleet.wait_for("paused", lambda s: s.generation == 2 and s.trained_steps > held.trained_steps)
    assert agent.history == [(1, 0), (2, held.trained_steps)]
    cancelled = (await fleet.ask("CancelRun", run_pb2.CancelRunRequest(run_id="paused"))).run
    assert cancelled.state == "CANCELLED"
    done = await fleet.wait_for("paused", lambda s: not s.in_flight_bytes and set(s.tasks) <= {"SETTLED", "SKIPPED"})
    assert sum(done.tasks.values()) == 80
    assert fleet.store.objects == {}
    await check_sound(fleet, "paused")
    with pytest.raises(ConfigError, match="CANCELLED"):
        await fleet.ask("ResumeRun", run_pb2.ResumeRunRequest(run_id="paused"))


async def test_the_draft_must_stay_the_same(fleet: Fleet, crew: tuple[Worker, Agent], tmp_path: Path) -> None:
    prompts = write_prompt_set(tmp_path / "prompts", 40)
    _, agent = crew
    agent.step_s = 0.02
    agent.crash_before = {5}
    await fleet.submit("changed", config_yaml(tmp_path / "runs", prompts), prompts)
    await fleet.wait_for("changed", lambda s: s.trained_steps >= 1)
    agent.identity = {"strategy": "eagle3", "mask_token_id": "4"}
    done = await fleet.wait_for("changed", lambda s: len(agent.exits) >= 2)
    assert agent.exits[0] == (1, "simulated crash before step 5")
    assert "mask_token_id: recorded '3', now '4'" in agent.exits[1][1]
    assert done.state == "PAUSED"


@pytest.mark.parametrize(
    ("tail", "max_steps", "tasks", "steps"),
    [
        ("drop", 0, {"SETTLED": 16, "DROPPED_TAIL": 4}, 4),
        ("pad", 0, {"SETTLED": 20}, 6),
        ("carry", 0, {"SETTLED": 20}, 5),
        ("carry", 3, {"SETTLED": 12, "SKIPPED": 8}, 3),
    ],
)
async def test_ends(
    fleet: Fleet,
    crew: tuple[Worker, Agent],
    tmp_path: Path,
    tail: str,
    max_steps: int,
    tasks: dict[str, int],
    steps: int,
) -> None:
    prompts = write_prompt_set(tmp_path / "prompts", 10)
    yaml = config_yaml(
        tmp_path / "runs", prompts, trainer={"batch_size": 4, "epochs": 2, "max_steps": max_steps}, flow={"tail": tail}
    )
    submitted = await fleet.submit("tail", yaml, prompts)
    done = await fleet.finish("tail")
    assert (done.state, done.total_steps, done.trained_steps) == ("SUCCEEDED", submitted.total_steps, steps)
    assert done.tasks == tasks
    assert done.total_steps == steps
    await check_sound(fleet, "tail")
    assert fleet.store.objects == {}


async def test_credits_bound_the_pool(
    coordinator: Coordinator, fleet: Fleet, crew: tuple[Worker, Agent], tmp_path: Path
) -> None:
    """Lengths are skewed 10:1; what is stored never exceeds the high mark, and no window is starved."""
    prompts = write_prompt_set(tmp_path / "prompts", 40, shortest=3, longest=30)
    fleet.store.capacity_bytes = PER_TOKEN * 30 * 8
    await until(lambda: "pool" in coordinator.hub.pools)
    await until(lambda: coordinator.hub.pools["pool"].capacity_bytes == fleet.store.capacity_bytes)
    await fleet.submit("tight", config_yaml(tmp_path / "runs", prompts), prompts)
    done = await fleet.finish("tight")
    assert done.state == "SUCCEEDED"
    assert done.high_bytes == int(fleet.store.capacity_bytes * 0.85)
    assert 0 < fleet.store.peak_bytes <= done.high_bytes
    fleet.store.capacity_bytes = PER_TOKEN * 60
    yaml = config_yaml(tmp_path / "runs", prompts)
    await until(lambda: coordinator.hub.pools["pool"].capacity_bytes == fleet.store.capacity_bytes)
    with pytest.raises(ConfigError, match=r"4 samples and at most \d+ bytes .* pool 'pool' holds") as refused:
        await fleet.submit("huge", yaml, prompts)
    assert refused.value.code == "SF-FLOW-WINDOW-TOO-LARGE"


async def test_marks_below_one_window_are_refused_before_a_pool_is_known(
    coordinator: Coordinator, fleet: Fleet, tmp_path: Path
) -> None:
    prompts = write_prompt_set(tmp_path / "prompts", 8)
    assert coordinator.hub.pools == {}
    with pytest.raises(ConfigError, match=r"high marks \d+ samples and 100 bytes; no pool has reported") as refused:
        await fleet.submit("starving", config_yaml(tmp_path / "runs", prompts, flow={"high_bytes": 100}), prompts)
    assert refused.value.code == "SF-FLOW-WINDOW-TOO-LARGE"
    await fleet.submit("free", config_yaml(tmp_path / "runs", prompts), prompts)


async def test_an_impostor_is_quarantined(fleet: Fleet, tmp_path: Path) -> None:
    prompts = write_prompt_set(tmp_path / "prompts", 8)
    wrong = records_pb2.CaptureContract()
    wrong.CopyFrom(CONTRACT)
    wrong.weights_hash = "other"
    impostor, honest, agent = Worker(fleet, "impostor", contract=wrong), Worker(fleet, "honest"), Agent(fleet)
    impostor.start()
    await fleet.submit("guarded", config_yaml(tmp_path / "runs", prompts), prompts)
    await until(lambda: bool(impostor.quarantined))
    assert "weights_hash: expected www" in impostor.quarantined
    members = {m.id: m for m in (await fleet.ask("ListFleet", run_pb2.ListFleetRequest())).members}
    assert members["impostor"].state == "QUARANTINED"
    honest.start()
    agent.start()
    assert (await fleet.finish("guarded")).state == "SUCCEEDED"
    for process in (impostor, honest, agent):
        await process.kill()


async def test_two_runs_share_the_pool(fleet: Fleet, crew: tuple[Worker, Agent], tmp_path: Path) -> None:
    prompts = write_prompt_set(tmp_path / "prompts", 20)
    second = Agent(fleet, "agent-2")
    second.start()
    for name in ("one", "two"):
        await fleet.submit(name, config_yaml(tmp_path / "runs", prompts), prompts)
    for name in ("one", "two"):
        assert (await fleet.finish(name)).state == "SUCCEEDED"
        check_model(fleet, name, 1, 20)
        await check_sound(fleet, name)
    await second.kill()
