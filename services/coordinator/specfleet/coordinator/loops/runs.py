"""The state of every run, derived from what is there: trainer, capture pool, the user's wish, the outbox."""

from collections.abc import Sequence

import structlog
from sqlalchemy import Connection

from specfleet.contracts.ids import prompts_subject
from specfleet.contracts.states import TERMINAL_RUN_STATES, RunState, TaskState
from specfleet.coordinator import launching, metrics
from specfleet.coordinator.facts import RunFacts
from specfleet.coordinator.hub import Hub, now_ms
from specfleet.coordinator.ledger import fleet, kept, outbox
from specfleet.coordinator.ledger import runs as run_rows
from specfleet.coordinator.ledger import tasks as task_rows
from specfleet.coordinator.loops.dispatcher import needs_capture, serves
from specfleet.policies.breaker import BreakerState
from specfleet.policies.retries import outcome

log = structlog.get_logger()

# Deletions still open this long after the final checkpoint no longer hold up the run; they go on being published.
DRAIN_MS = 30_000
# A stopped run's ranks get this long to write their last checkpoint before their launch is no longer listed.
STOP_GRACE_MS = 90_000


class Runs:
    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._purged: set[int] = set()
        self._stopping: dict[str, int] = {}

    async def one_pass(self) -> None:
        assigned = await self._hub.ledger.write(lambda conn: launching.assign(self._hub, conn))
        for run_id in assigned:
            self._hub.tell(run_id, "launch", "a launch was assigned to a trainer agent")
        rows = await self._hub.ledger.read(run_rows.every)
        for row in rows:
            if row.state in TERMINAL_RUN_STATES:
                await self._clean_up(self._hub.facts(row), row)
            else:
                await self._update(self._hub.facts(row))
        await self._hub.ledger.write(self._stop_launches)

    async def _update(self, facts: RunFacts) -> None:
        if await self._hub.ledger.write(lambda conn: self._derive(conn, facts)):
            self._hub.outbox.set()
            self._hub.dispatch.set()
            self._hub.plan.set()

    def _derive(self, conn: Connection, facts: RunFacts) -> bool:
        """Returns whether other loops have something to do."""
        row = run_rows.get(conn, facts.run)
        if row.state in TERMINAL_RUN_STATES:
            return False
        if row.final and row.state != RunState.DRAINING:
            run_rows.set_values(conn, row.id, drain_deadline_ms=now_ms() + DRAIN_MS)
            kept.drop(conn, facts, now_ms())
            return self._hub.set_state(conn, row, RunState.DRAINING, "waiting for deletions")
        if row.state == RunState.DRAINING:
            return self._drained(conn, facts, row)
        if row.wanted == "pause":
            # Whoever asked for the pause has set the state, and said why.
            return row.state != RunState.PAUSED and self._hub.set_state(conn, row, RunState.PAUSED, "paused by user")
        if self._starved(conn, facts, row):
            return True
        evicted = self._evict(conn, facts, row)
        state, reason = self._wanted_state(conn, facts, row)
        return self._hub.set_state(conn, row, state, reason) or evicted > 0

    def _wanted_state(self, conn: Connection, facts: RunFacts, row: run_rows.RunRow) -> tuple[RunState, str]:
        workers = fleet.live_workers(conn)
        served = any(_able(worker, facts) for worker in workers)
        if row.generation == 0:
            waits = [] if served or facts.offline else [_missing(workers, facts)]
            waits += [] if fleet.nodes(conn, run=row.id) else ["no trainer agent with free slots yet"]
            return RunState.PREPARING, "; ".join(waits) or "trainer and capture are loading"
        if not row.attached_world:
            return RunState.PAUSED, "trainer detached"
        if not served and needs_capture(conn, facts, row):
            return RunState.PAUSED, "capture pool empty"
        return RunState.RUNNING, ""

    def _starved(self, conn: Connection, facts: RunFacts, row: run_rows.RunRow) -> bool:
        """Keeps the clock of an empty capture pool; True when the run was given up over it."""
        missing = needs_capture(conn, facts, row) and not any(
            _able(worker, facts) for worker in fleet.live_workers(conn)
        )
        since = (row.starved_since_ms or now_ms()) if missing else 0
        if since != row.starved_since_ms:
            run_rows.set_values(conn, row.id, starved_since_ms=since)
        deadline_s = facts.config.flow.starved_deadline_s
        if not (missing and deadline_s and now_ms() - since > deadline_s * 1000):
            return False
        reason = f"no capture worker was alive for {deadline_s} s (flow.starved_deadline_s)"
        return self._hub.set_state(conn, row, RunState.FAILED, reason)

    def _evict(self, conn: Connection, facts: RunFacts, row: run_rows.RunRow) -> int:
        marks = self._hub.marks(facts, row.store)
        if marks is None or facts.config.flow.order != "deterministic" or not row.attached_world:
            return 0
        evicted = task_rows.evict(conn, facts, self._hub.gates[facts.run], marks, now_ms())
        if evicted:
            log.info("gave up captured samples to make room", run=facts.run_id, samples=evicted)
        return evicted

    def _drained(self, conn: Connection, facts: RunFacts, row: run_rows.RunRow) -> bool:
        if outbox.open_rows(conn, facts.run)[0] and now_ms() < row.drain_deadline_ms:
            return False
        counts = run_rows.counts(conn, facts.run)
        dead, total = counts.get(TaskState.DEAD, 0), sum(counts.values())
        state = RunState(outcome(dead, total, facts.config.flow.max_dead_fraction))
        reason = (
            f"{dead} of {total} prompts are dead; flow.max_dead_fraction is {facts.config.flow.max_dead_fraction}"
            if dead
            else ""
        )
        return self._hub.set_state(conn, row, state, reason)

    async def _clean_up(self, facts: RunFacts, row: run_rows.RunRow) -> None:
        """A cancelled or failed run gives everything back: queued prompts, leases, captured samples."""
        if row.state in (RunState.SUCCEEDED, RunState.DEGRADED) or row.id in self._purged:
            return
        await self._hub.bus.purge(prompts_subject(facts.contract_hash, facts.run_id))
        reason = row.state.lower()
        while await self._hub.ledger.write(lambda conn: task_rows.purge(conn, facts, reason, now_ms())):
            self._hub.outbox.set()
        # A window the ranks still train is finished by them; what was planned is given back once they are gone.
        if not row.attached_world:
            self._purged.add(row.id)

    def _stop_launches(self, conn: Connection) -> None:
        """Launches of runs that should not train: ended when their ranks left, or when their grace is over."""
        for node in fleet.nodes(conn):
            row = run_rows.get(conn, node.run)
            if row.wanted == "run" and row.state not in TERMINAL_RUN_STATES:
                continue
            deadline = self._stopping.setdefault(node.launch_id, now_ms() + STOP_GRACE_MS)
            if node.launch_state == "ASSIGNED" or now_ms() > deadline:
                launching.end_launch(self._hub, conn, node.launch_id, 0, f"run is {row.state}")
                self._stopping.pop(node.launch_id, None)


def _able(worker: fleet.WorkerRow, facts: RunFacts) -> bool:
    return serves(worker, facts) and fleet.breaker(worker).state is not BreakerState.OPEN


def _missing(workers: Sequence[fleet.WorkerRow], facts: RunFacts) -> str:
    """What a run that no worker can serve waits for."""
    engine = facts.contract.engine
    others = sorted({worker.engine for worker in workers} - {engine})
    if not others or any(worker.engine == engine for worker in workers):
        return "no capture worker yet"
    return f"no capture worker with engine {engine} (capture.engine) yet, only {', '.join(others)}"


def observe(conn: Connection, facts: RunFacts, row: run_rows.RunRow) -> None:
    """Gauges of one run."""
    counts = run_rows.counts(conn, facts.run)
    for state in TaskState:
        metrics.TASKS.labels(facts.run_id, str(state)).set(counts.get(state, 0))
    metrics.CONSERVED.labels(facts.run_id).set(float(sum(counts.values()) == row.ingested))
    held = task_rows.held(conn, facts.run)
    metrics.IN_FLIGHT_BYTES.labels(facts.run_id).set(held.num_bytes)
    metrics.IN_FLIGHT_SAMPLES.labels(facts.run_id).set(held.num_samples)
    metrics.TRAINED_STEP.labels(facts.run_id).set(row.trained_step)
    metrics.OUTBOX_OPEN.labels(facts.run_id).set(outbox.open_rows(conn, facts.run)[0])
