"""TrainerControl: what trainer agents and their ranks ask."""

import asyncio
import json
from typing import Any

import structlog
from sqlalchemy import Connection

from specfleet.contracts.errors import ConfigError, LedgerError
from specfleet.contracts.ids import steps_subject
from specfleet.contracts.states import RunState
from specfleet.coordinator import launching, metrics
from specfleet.coordinator.facts import RunFacts
from specfleet.coordinator.hub import HEARTBEAT_S, Hub, now_ms
from specfleet.coordinator.ledger import fleet, generations
from specfleet.coordinator.ledger import runs as run_rows
from specfleet.coordinator.ledger import windows as window_rows
from specfleet.wire import trainer_pb2 as pb
from specfleet.wire.trainer_pb2_grpc import TrainerControlServicer

log = structlog.get_logger()


class _Barrier:
    """Ranks of one launch that have joined and wait for the others."""

    def __init__(self) -> None:
        self.ranks: dict[int, int] = {}
        """rank → how many calls of it wait now."""
        self.opened: asyncio.Future[generations.Opened] = asyncio.get_running_loop().create_future()


class TrainerApi(TrainerControlServicer):
    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._barriers: dict[str, _Barrier] = {}

    # -- agents ---------------------------------------------------------------------------------------------------

    async def RegisterAgent(self, request: pb.RegisterAgentRequest, context: Any) -> pb.RegisterAgentResponse:
        """Ranks die with their agent, so launches of an earlier process of this agent are over."""

        def register(conn: Connection) -> None:
            known = fleet.agent(conn, request.agent_id)
            now = now_ms()
            if known is not None and (known.pid != request.pid or known.host != request.host):
                for node in fleet.nodes(conn, agent_id=request.agent_id):
                    launching.end_launch(self._hub, conn, node.launch_id, 0, f"agent {request.agent_id} was restarted")
            fleet.put_agent(
                conn, agent_id=request.agent_id, host=request.host, pid=request.pid, slots=request.slots,
                device=request.device, versions=json.dumps(dict(request.versions)), seen_ms=now, lost=0,
                registered_ms=now,
            )  # fmt: skip

        await self._hub.ledger.write(register)
        log.info("trainer agent registered", agent=request.agent_id, slots=request.slots, device=request.device)
        self._hub.care.set()
        return pb.RegisterAgentResponse(heartbeat_s=HEARTBEAT_S)

    async def HeartbeatAgent(self, request: pb.HeartbeatAgentRequest, context: Any) -> pb.HeartbeatAgentResponse:
        def beat(conn: Connection) -> tuple[pb.HeartbeatAgentResponse, bool]:
            agent = fleet.agent(conn, request.agent_id)
            if agent is None:
                return pb.HeartbeatAgentResponse(unknown=True), False
            fleet.put_agent(conn, agent_id=request.agent_id, seen_ms=now_ms(), lost=0)
            ended = False
            for status in request.launches:
                if status.state == "EXITED":
                    code, message = status.exit_code, status.message
                    ended = launching.end_launch(self._hub, conn, status.launch_id, code, message) or ended
                else:
                    fleet.set_node_state(conn, status.launch_id, request.agent_id, status.state)
            listed = [self._launch(conn, node) for node in fleet.nodes(conn, agent_id=request.agent_id)]
            return pb.HeartbeatAgentResponse(launches=listed), ended or bool(agent.lost)

        response, changed = await self._hub.ledger.write(beat)
        if changed:
            self._hub.care.set()
        return response

    def _launch(self, conn: Connection, node: fleet.Node) -> pb.Launch:
        row = run_rows.get(conn, node.run)
        return pb.Launch(
            run_id=row.run_id, launch_id=node.launch_id, world=node.world, nnodes=node.nnodes, node_rank=node.node_rank,
            nproc_per_node=node.nproc, rendezvous=node.rendezvous, config_yaml=row.config_yaml, output_dir=row.output_dir,
            prompt_set_uri=row.prompt_set_uri,
        )  # fmt: skip

    # -- ranks ----------------------------------------------------------------------------------------------------

    async def JoinRun(self, request: pb.JoinRunRequest, context: Any) -> pb.JoinRunResponse:
        """Waits for every rank of the launch; the last one opens the generation. A repeated join gets the same answer."""
        facts = await self._hub.facts_of(request.run_id)
        known = await self._hub.ledger.write(lambda conn: self._admit(conn, facts, request))
        opened = known or await self._gather(facts, request)
        store = (await self._hub.ledger.read(lambda conn: run_rows.get(conn, facts.run))).store
        return pb.JoinRunResponse(
            generation=opened.generation,
            checkpoint_uri=opened.checkpoint_uri,
            checkpoint_digest=opened.checkpoint_digest,
            restored_step=opened.restored_step,
            total_steps=facts.total_steps,
            contract=facts.contract,
            store=store,
            steps_subject=steps_subject(facts.run_id, opened.generation, request.rank),
        )

    def _admit(self, conn: Connection, facts: RunFacts, request: pb.JoinRunRequest) -> generations.Opened | None:
        """Checks that the rank belongs here; returns the generation when it is open already."""
        launch = fleet.launch(conn, request.launch_id)
        if launch is None or launch.run != facts.run or launch.state == "ENDED":
            raise LedgerError(
                "SF-RUN-STALE-LAUNCH", f"launch {request.launch_id} of run {facts.run_id} is over or unknown; leave"
            )
        if launch.world != request.world or request.rank >= launch.world:
            raise ConfigError(
                "SF-RUN-WORLD",
                f"launch {request.launch_id} has {launch.world} ranks; rank {request.rank} of {request.world} joined",
            )
        generations.check_identity(conn, facts, request.identity)
        return (
            generations.open_generation(conn, facts, request.launch_id, now_ms()) if launch.state == "JOINED" else None
        )

    async def _gather(self, facts: RunFacts, request: pb.JoinRunRequest) -> generations.Opened:
        barrier = self._barriers.setdefault(request.launch_id, _Barrier())
        barrier.ranks[request.rank] = barrier.ranks.get(request.rank, 0) + 1
        try:
            if len(barrier.ranks) == request.world and not barrier.opened.done():
                await self._open(facts, request.launch_id, barrier)
            return await asyncio.shield(barrier.opened)
        finally:
            # A rank whose call was given up no longer waits: it must not count when the others complete.
            barrier.ranks[request.rank] -= 1
            if not barrier.ranks[request.rank]:
                del barrier.ranks[request.rank]
            if not barrier.ranks and self._barriers.get(request.launch_id) is barrier:
                del self._barriers[request.launch_id]
                if not barrier.opened.done():
                    barrier.opened.cancel()

    async def _open(self, facts: RunFacts, launch_id: str, barrier: _Barrier) -> None:
        def open_generation(conn: Connection) -> generations.Opened:
            opened = generations.open_generation(conn, facts, launch_id, now_ms())
            row = run_rows.get(conn, facts.run)
            if row.wanted == "run" and row.state in (RunState.PREPARING, RunState.PAUSED, RunState.DRAINING):
                self._hub.set_state(conn, row, RunState.RUNNING, "")
            return opened

        try:
            opened = await self._hub.ledger.write(open_generation)
        except Exception as error:
            if not barrier.opened.done():
                barrier.opened.set_exception(error)
            return
        if not barrier.opened.done():
            barrier.opened.set_result(opened)
        log.info(
            "generation opened", run=facts.run_id, generation=opened.generation, restored_step=opened.restored_step
        )
        self._hub.tell(facts.run_id, "generation", f"generation {opened.generation} from step {opened.restored_step}")
        for rank in range(len(barrier.ranks)):
            # Nobody follows the old generation any more.
            await self._hub.bus.purge(steps_subject(facts.run_id, opened.generation - 1, rank))
        self._hub.plan.set()
        self._hub.dispatch.set()
        self._hub.outbox.set()

    async def AckStep(self, request: pb.AckStepRequest, context: Any) -> pb.AckStepResponse:
        facts = await self._hub.facts_of(request.run_id)
        given = generations.Ack(
            request.generation, request.step, request.rank, request.digest, request.revision, request.num_tokens,
            request.num_loss_tokens, request.step_s, request.wait_s, dict(request.metrics),
        )  # fmt: skip
        with metrics.ACK_SECONDS.time():
            acked = await self._hub.ledger.write(lambda conn: generations.ack(conn, facts, given, now_ms()))
        metrics.ACKS.labels("accepted" if acked.accepted else "refused").inc()
        rates = self._hub.rates[facts.run]
        if acked.fresh:
            rates.step.add(request.step_s)
            rates.wait.add(request.wait_s)
        if acked.trained_tokens:
            rates.trained.add(acked.trained_tokens)
            self._hub.plan.set()
            self._hub.outbox.set()
        return pb.AckStepResponse(accepted=acked.accepted, current_generation=acked.current_generation)

    async def ReportLost(self, request: pb.ReportLostRequest, context: Any) -> pb.ReportLostResponse:
        facts = await self._hub.facts_of(request.run_id)

        def lose(conn: Connection) -> tuple[bool, int]:
            if run_rows.get(conn, facts.run).generation != request.generation:
                return False, 0
            if facts.offline:
                return True, self._pause(conn, facts, request.reason)
            lost = [(a.task.epoch, a.task.prompt_index, a.attempt) for a in request.lost]
            return True, window_rows.lose(conn, facts, request.step, lost, request.reason, now_ms())

        accepted, n = await self._hub.ledger.write(lose)
        if n:
            metrics.LOST.labels(facts.run_id).inc(n)
            log.warning("features lost", run=facts.run_id, step=request.step, samples=n, reason=request.reason)
            self._hub.tell(facts.run_id, "lost", f"{n} samples of step {request.step}: {request.reason}")
        self._hub.plan.set()
        self._hub.dispatch.set()
        self._hub.outbox.set()
        return pb.ReportLostResponse(accepted=accepted)

    def _pause(self, conn: Connection, facts: RunFacts, reason: str) -> int:
        """Nothing can capture again what a feature set lost: the run keeps what it has trained and waits for its user."""
        row = run_rows.get(conn, facts.run)
        if row.wanted == "run":
            self._hub.pause(conn, row, f"{reason}. Then: specctl run resume {row.run_id}")
        return 0

    async def CommitCheckpoint(self, request: pb.CommitCheckpointRequest, context: Any) -> pb.CommitCheckpointResponse:
        facts = await self._hub.facts_of(request.run_id)
        accepted = await self._hub.ledger.write(
            lambda conn: generations.commit_checkpoint(
                conn, facts, request.generation, request.step, request.uri, request.digest,
                final=request.final, now_ms=now_ms(),
            )
        )  # fmt: skip
        if accepted:
            log.info("checkpoint committed", run=facts.run_id, step=request.step, final=request.final)
            self._hub.tell(facts.run_id, "checkpoint", f"step {request.step}" + (", final" if request.final else ""))
        for wake in (self._hub.plan, self._hub.care, self._hub.outbox):
            wake.set()
        return pb.CommitCheckpointResponse(accepted=accepted)

    async def DetachRun(self, request: pb.DetachRunRequest, context: Any) -> pb.DetachRunResponse:
        facts = await self._hub.facts_of(request.run_id)

        def detach(conn: Connection) -> None:
            # Ranks leave together, after the last ack and checkpoint: the first to say so speaks for all.
            row = run_rows.get(conn, facts.run)
            if row.generation == request.generation:
                launching.end_generation(self._hub, conn, row, f"detached: {request.reason}")

        await self._hub.ledger.write(detach)
        log.info(
            "rank detached", run=facts.run_id, generation=request.generation, rank=request.rank, reason=request.reason
        )
        self._hub.care.set()
        return pb.DetachRunResponse()
