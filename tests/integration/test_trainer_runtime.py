"""Real ranks under a small coordinator: real gRPC, real NATS, a real EAGLE-3 draft, features in a directory store."""

import asyncio
import hashlib
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from fixtures.net import NatsServer
from fixtures.trainer_bench import PATIENCE_S, Bench, World, make_world, put_sample, run_bench

from specfleet.contracts.ids import sample_id
from specfleet.drafts.checkpoint import load_draft_checkpoint
from specfleet.rpc.server import RpcServer
from specfleet.store.factory import open_store
from specfleet.wire.records_pb2 import SampleRef, TaskAttempt
from specfleet.wire.trainer_pb2_grpc import add_TrainerControlServicer_to_server

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> Iterator[World]:
    directory = tmp_path_factory.mktemp("trainer")
    nats = NatsServer(directory / "jetstream")
    nats.start()
    yield make_world(directory, nats.url, tiny_target)
    nats.stop()


@dataclass
class Reference:
    weights: dict[str, torch.Tensor]
    metrics: list[dict[str, Any]]


@pytest.fixture(scope="module")
def reference(world: World) -> Reference:
    """An uninterrupted run of six steps on one rank; the run itself is checked on the way."""

    async def train() -> Reference:
        async with run_bench(world, "reference", steps=6) as bench:
            assert await bench.wait(bench.start_rank("a")) == 0, bench.log()
            _check_whole_run(bench)
            return Reference(bench.weights(6), bench.metrics())

    return asyncio.run(train())


def _check_whole_run(bench: Bench) -> None:
    control = bench.control
    assert sorted(control.acks) == [(1, step, 0) for step in range(1, 7)]
    for (_, step, _), ack in control.acks.items():
        ids = "\n".join(sample_id(ref.attempt) for ref in control.windows[step - 1])
        assert ack.digest == hashlib.sha256(ids.encode()).hexdigest()
        assert ack.metrics["loss"] > 0
        assert ack.num_tokens > ack.num_loss_tokens > 0
    assert [(commit.step, commit.final) for commit in control.commits] == [(3, False), (6, False), (6, True)]
    assert control.commits[1].digest == control.commits[2].digest
    assert control.unready_commits == []
    lines = bench.metrics()
    assert [line["step"] for line in lines] == list(range(1, 7))
    # Oracle 35 with total 6 and a warm-up of int(0.3 · 6) = 1 step.
    assert lines[0]["lr"] == pytest.approx(1e-2)
    assert lines[5]["lr"] == pytest.approx(0.5e-2 * (1 + torch.cos(torch.tensor(torch.pi * 4 / 5)).item()))
    assert {"acc_0", "grad_norm", "tokens_per_s", "wait_s", "step_s", "time"} <= lines[0].keys()
    draft, meta = load_draft_checkpoint(Path(control.commits[-1].uri))
    assert meta["step"] == 6
    assert all(torch.equal(tensor, bench.weights(6)[name]) for name, tensor in draft.state_dict().items())


async def test_kill_and_resume_gives_the_weights_of_an_uninterrupted_run(world: World, reference: Reference) -> None:
    async with run_bench(world, "resumed", steps=6) as bench:
        bench.control.hold_after = 4
        first = bench.start_rank("a")
        # Step 4 is trained and acked, but only step 3 is in a checkpoint.
        await bench.control.until(lambda: (1, 4, 0) in bench.control.acks and bool(bench.control.commits))
        first.kill()
        assert await bench.wait(first) == -signal.SIGKILL
        bench.control.hold_after = 0
        assert await bench.wait(bench.start_rank("b")) == 0, bench.log()
        assert [step for generation, step, _ in sorted(bench.control.acks) if generation == 2] == [4, 5, 6]
        for name, tensor in reference.weights.items():
            assert torch.equal(tensor, bench.weights(6)[name]), name
        assert [line["step"] for line in bench.metrics()] == list(range(1, 7))


async def test_two_ranks_under_the_agent_learn_what_one_rank_learns(world: World, reference: Reference) -> None:
    async with run_bench(world, "pair", steps=6, ranks=2) as bench:
        control = bench.control
        control.launches = [bench.launch("a")]
        agent = bench.start_agent()
        await control.until(lambda: any(status.state == "EXITED" for status in control.statuses))
        assert [(status.exit_code, status.message) for status in control.statuses] == [(0, "")], bench.log()
        for ours, theirs in zip(bench.metrics(), reference.metrics, strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4), ours
            assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4), ours
            assert ours["tokens"] == theirs["tokens"]
        for name, tensor in reference.weights.items():
            # By norm: AdamW turns the rounding of a gradient that is almost zero into a whole step of that element.
            difference = torch.linalg.vector_norm(bench.weights(6)[name].float() - tensor.float())
            assert difference <= 2e-3 * torch.linalg.vector_norm(tensor.float()), name
        assert len(control.acks) == 12
        assert control.unready_commits == []
        # What is not listed any more is forgotten; SIGTERM then ends an idle agent.
        control.launches = []
        await control.until(lambda: not control.statuses)
        agent.send_signal(signal.SIGTERM)
        assert await bench.wait(agent) == 0


async def test_sigterm_of_the_agent_checkpoints_and_detaches(world: World) -> None:
    async with run_bench(world, "detached", steps=6, ranks=2) as bench:
        control = bench.control
        control.hold_after = 2
        control.launches = [bench.launch("a")]
        agent = bench.start_agent()
        await control.until(lambda: {(1, 2, 0), (1, 2, 1)} <= control.acks.keys())
        await control.until(lambda: 'specfleet_trainer_step{run="detached"} 2.0' in bench.scrape())
        agent.send_signal(signal.SIGTERM)
        assert await bench.wait(agent) == 0
        assert [(commit.step, commit.final) for commit in control.commits] == [(2, False)], bench.log()
        assert {request.rank for request in control.detached} == {0, 1}
        assert [(status.state, status.exit_code) for status in control.statuses] == [("EXITED", 0)]


async def test_kill_of_the_agent_leaves_no_orphan(world: World) -> None:
    async with run_bench(world, "orphans", steps=6) as bench:
        control = bench.control
        control.hold_after = 2
        control.launches = [bench.launch("a")]
        agent = bench.start_agent()
        await control.until(lambda: (1, 2, 0) in control.acks)
        below = psutil.Process(agent.pid).children(recursive=True)
        assert len(below) >= 2
        agent.kill()
        await bench.wait(agent)
        _, alive = await asyncio.to_thread(psutil.wait_procs, below, PATIENCE_S)
        assert alive == []
        # They were asked to leave, not shot: what they had trained is in a checkpoint.
        assert [commit.step for commit in control.commits] == [2]
        # The next life of the agent does not start that launch a second time; it says that it is over.
        agent = bench.start_agent()
        await control.until(lambda: any(status.state == "EXITED" for status in control.statuses))
        assert len(control.registered) == 2
        assert "restarted" in control.statuses[0].message


async def test_crash_of_a_rank_is_reported_with_its_exit_code(world: World) -> None:
    async with run_bench(world, "crashed", steps=6, ranks=2) as bench:
        control = bench.control
        control.hold_after = 1
        control.launches = [bench.launch("a")]
        agent = bench.start_agent()
        await control.until(lambda: {(1, 1, 0), (1, 1, 1)} <= control.acks.keys())
        (launcher,) = psutil.Process(agent.pid).children()
        (victim,) = [rank for rank in launcher.children() if rank.environ()["RANK"] == "1"]
        victim.kill()
        await control.until(lambda: any(status.state == "EXITED" for status in control.statuses))
        (status,) = control.statuses
        assert status.exit_code == 128 + signal.SIGKILL
        assert "rank 1 ended" in status.message
        assert psutil.pid_exists(agent.pid)


async def test_training_goes_on_while_the_coordinator_is_away(world: World) -> None:
    async with run_bench(world, "away", steps=8) as bench:
        control = bench.control
        control.hold_after = 3
        rank = bench.start_rank("a")
        await control.until(lambda: bool(control.commits))
        await bench.server.stop(0)
        await control.publish(4, 5)
        async with asyncio.timeout(PATIENCE_S):
            while len(bench.metrics()) < 5:  # noqa: ASYNC110  # a file written by another process
                await asyncio.sleep(0.05)
        assert max(control.ack_order) == 3
        bench.server = RpcServer(bench.address)
        bench.server.add(add_TrainerControlServicer_to_server, control, "specfleet.v1.TrainerControl")
        await bench.server.start()
        await control.publish(6, 8)
        assert await bench.wait(rank) == 0, bench.log()
        assert control.ack_order == list(range(1, 9))
        assert [commit.step for commit in control.commits] == [3, 6, 8]
        assert control.unready_commits == []


async def test_lost_object_is_reported_and_its_substitute_trained(world: World) -> None:
    async with run_bench(world, "lost", steps=3) as bench:
        control = bench.control
        gone = control.windows[1][2]
        store = open_store(world.store_url)
        store.release(gone)
        store.close()

        def substitute(attempt: TaskAttempt) -> SampleRef:
            return put_sample(
                world, "lost", control.contract, attempt.task.prompt_index, length=gone.num_tokens, attempt=2
            )

        control.substitute = substitute
        assert await bench.wait(bench.start_rank("a")) == 0, bench.log()
        (report,) = control.lost
        assert (report.step, report.revision, list(report.lost)) == (2, 0, [gone.attempt])
        assert control.acks[1, 2, 0].revision == 1
        assert [(commit.step, commit.final) for commit in control.commits] == [(3, False), (3, True)]


async def test_fenced_generation_leaves_without_a_checkpoint(world: World) -> None:
    async with run_bench(world, "fenced", steps=6) as bench:
        control = bench.control
        control.hold_after = 1
        rank = bench.start_rank("a")
        await control.until(lambda: (1, 1, 0) in control.acks)
        control.fences = True
        await control.publish(2, 2)
        assert await bench.wait(rank) == 0, bench.log()
        assert control.commits == []
        assert control.detached == []
        assert not (bench.directory / "checkpoints" / "step-00000002").exists()


async def test_altered_checkpoint_is_refused_with_exit_code_2(world: World) -> None:
    async with run_bench(world, "altered", steps=6) as bench:
        control = bench.control
        control.hold_after = 3
        first = bench.start_rank("a")
        await control.until(lambda: bool(control.commits))
        first.send_signal(signal.SIGTERM)
        assert await bench.wait(first) == 0
        assert control.detached[0].reason == "SIGTERM"
        path = Path(control.commits[0].uri) / "draft.safetensors"
        os.truncate(path, path.stat().st_size - 1)
        assert await bench.wait(bench.start_rank("b")) == 2
        assert "SF-CHECKPOINT-HASH" in bench.log()
