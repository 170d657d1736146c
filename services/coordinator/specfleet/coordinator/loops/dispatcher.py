"""Puts prompts on the bus as far as credits allow, fairly over runs."""

from collections.abc import Sequence

from sqlalchemy import Connection, func, select

from specfleet.contracts.errors import SpecfleetError
from specfleet.contracts.ids import prompts_subject, sample_id, task_key
from specfleet.contracts.states import RunState, TaskState
from specfleet.coordinator import metrics
from specfleet.coordinator.facts import RunFacts
from specfleet.coordinator.hub import Hub, now_ms
from specfleet.coordinator.ledger import fleet
from specfleet.coordinator.ledger import runs as run_rows
from specfleet.coordinator.ledger import tasks as task_rows
from specfleet.coordinator.ledger.kept import kept_bytes
from specfleet.coordinator.ledger.tables import outbox, tasks
from specfleet.policies.credits import POOL_HIGH_FRACTION, Held, check_window_fits
from specfleet.policies.fair import Share, fair_order
from specfleet.wire.records_pb2 import PromptTask, TaskAttempt

TICK_S = 1.0
# Tasks are written this many at a time, and a new chunk when fewer than half of it is left to dispatch.
INGEST_CHUNK = 4_096
# Prompts of one run before another run gets its turn.
TURN = 64


class Dispatcher:
    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    async def one_pass(self) -> None:
        rows = [row for row in await self._hub.ledger.read(run_rows.active) if wants_prompts(row)]
        ready = [row for row in rows if await self._prepare(row)]
        while ready:
            by_id = {row.id: row for row in ready}
            held = await self._held(list(by_id))
            ready = []
            for run in fair_order(Share(run, held[run].num_samples) for run in by_id):
                if await self._turn(self._hub.facts(by_id[run]), by_id[run]) == TURN:
                    ready.append(by_id[run])

    async def _held(self, runs: list[int]) -> dict[int, Held]:
        return await self._hub.ledger.read(lambda conn: {run: task_rows.held(conn, run) for run in runs})

    async def _prepare(self, row: run_rows.RunRow) -> bool:
        """Ingests tasks when they run low, binds the run to a pool, checks that a window fits. False: no dispatch now."""
        facts = self._hub.facts(row)
        try:
            recorded = await self._hub.features.recorded(facts)
            if facts.offline:
                await self._hub.features.open(row.store)
        except SpecfleetError as error:
            # A run whose feature set cannot be read waits for its user.
            message = str(error)
            await self._hub.ledger.write(lambda conn: self._hub.pause(conn, row, message))
            return False
        await self._ingest(facts, recorded)
        if facts.offline:
            return True
        store = row.store if row.store in self._hub.pools else self._largest_pool()
        if not store:
            return False
        if store != row.store:
            await self._hub.ledger.write(lambda conn: run_rows.set_values(conn, row.id, store=store))
        return await self._fits(facts, row, store)

    def _largest_pool(self) -> str:
        pools = sorted(self._hub.pools.values(), key=lambda pool: (pool.capacity_bytes, pool.name))
        return pools[-1].name if pools else ""

    async def _fits(self, facts: RunFacts, row: run_rows.RunRow, store: str) -> bool:
        marks = self._hub.marks(facts, store)
        if marks is None:
            return False
        try:
            check_window_fits(
                marks,
                capacity_bytes=self._hub.pools[store].capacity_bytes,
                window_samples=facts.config.global_batch,
                window_bytes=facts.window_tokens * facts.bytes_per_token,
                bytes_per_token=facts.bytes_per_token,
                store=store,
            )
        except SpecfleetError as error:
            if self._hub.sharing.get(store, 1) > 1:
                # Fits alone, perhaps: it waits until other runs have left the pool.
                return False
            message = str(error)
            await self._hub.ledger.write(lambda conn: self._hub.set_state(conn, row, RunState.FAILED, message))
            return False
        return True

    async def _ingest(self, facts: RunFacts, recorded: frozenset[int]) -> None:
        def state(conn: Connection) -> tuple[int, int]:
            fresh = select(func.count()).where(
                tasks.c.run == facts.run, tasks.c.state == str(TaskState.READY), tasks.c.dispatched_ms.is_(None)
            )
            return run_rows.get(conn, facts.run).ingested, int(conn.execute(fresh).scalar_one())

        cursor, waiting = await self._hub.ledger.read(state)
        if cursor < facts.num_tasks and waiting < INGEST_CHUNK // 2:
            prompts = await self._hub.prompts.tasks(facts, cursor, INGEST_CHUNK)
            await self._hub.ledger.write(lambda conn: task_rows.ingest(conn, facts, prompts, cursor, recorded))
            if recorded:
                # Perhaps none of them is left to dispatch.
                self._hub.dispatch.set()

    async def _turn(self, facts: RunFacts, row: run_rows.RunRow) -> int:
        features = await self._hub.features.open(row.store) if facts.offline else None

        def dispatch(conn: Connection) -> tuple[str, list[task_rows.Dispatched]]:
            current = run_rows.get(conn, facts.run)
            marks = self._hub.marks(facts, current.store)
            limit = min(TURN, _still_needed(conn, facts, current.trained_step))
            if marks is None or not wants_prompts(current) or limit <= 0:
                return current.store, []
            free = 0 if facts.offline else self._pool_free(conn, current.store)
            gate = self._hub.gates[facts.run]
            return current.store, task_rows.dispatch(conn, facts, gate, marks, free, limit, now_ms(), features)

        store, chosen = await self._hub.ledger.write(dispatch)
        announced = [task for task in chosen if not task.taken_over]
        if announced:
            await self._publish(facts, store, announced)
        if len(announced) < len(chosen):
            self._hub.plan.set()
        return len(chosen)

    def _pool_free(self, conn: Connection, store: str) -> int:
        """Bytes that all runs together may still reserve in a pool."""
        return int(self._hub.pools[store].capacity_bytes * POOL_HIGH_FRACTION) - _pool_held(conn, store)

    async def _publish(self, facts: RunFacts, store: str, chosen: Sequence[task_rows.Dispatched]) -> None:
        prompts = await self._hub.prompts.read(facts.prompt_set_uri, [task.prompt_index for task in chosen])
        messages = []
        for task, prompt in zip(chosen, prompts, strict=True):
            attempt = TaskAttempt(task=task_key(facts.run_id, task.epoch, task.prompt_index), attempt=task.attempt)
            message = PromptTask(
                attempt=attempt,
                contract_hash=facts.contract_hash,
                input_ids=prompt.input_ids,
                loss_mask=prompt.loss_mask,
                store=store,
                features=facts.features,
                reserved_bytes=task.reserved_bytes,
            )
            subject = prompts_subject(facts.contract_hash, facts.run_id)
            messages.append((subject, message.SerializeToString(), sample_id(attempt)))
        await self._hub.bus.publish_many(messages)
        metrics.DISPATCHED.labels(facts.run_id).inc(len(messages))


def wants_prompts(row: run_rows.RunRow) -> bool:
    """Capture may run ahead of the trainer, but not of a user's pause, and not after the final checkpoint."""
    return (
        row.wanted == "run" and not row.final and row.state in (RunState.PREPARING, RunState.RUNNING, RunState.PAUSED)
    )


def _still_needed(conn: Connection, facts: RunFacts, trained_step: int) -> int:
    """Samples the remaining steps need beyond those under way: max_steps must not capture a whole epoch."""
    if not facts.config.trainer.max_steps:
        return facts.num_tasks
    flying = select(func.count()).where(tasks.c.run == facts.run, tasks.c.dispatched_ms.is_not(None))
    states = [str(TaskState.LEASED), str(TaskState.CAPTURED)]
    busy = select(func.count()).where(tasks.c.run == facts.run, tasks.c.state.in_(states))
    under_way = int(conn.execute(flying).scalar_one()) + int(conn.execute(busy).scalar_one())
    return (facts.total_steps - trained_step) * facts.config.global_batch - under_way


def _pool_held(conn: Connection, store: str) -> int:
    """Bytes all runs hold in a pool, unconfirmed deletions included."""
    reserved = sum(
        int(conn.execute(_RESERVED.where(tasks.c.run == row.id)).scalar_one()) + kept_bytes(conn, row.id)
        for row in run_rows.active(conn)
        if row.store == store
    )
    unconfirmed = select(func.coalesce(func.sum(outbox.c.num_bytes), 0)).where(outbox.c.store == store)
    return reserved + int(conn.execute(unconfirmed).scalar_one())


_RESERVED = select(func.coalesce(func.sum(tasks.c.reserved_bytes), 0)).where(tasks.c.reserved_bytes.is_not(None))


def needs_capture(conn: Connection, facts: RunFacts, row: run_rows.RunRow) -> bool:
    """Something is left to capture. A run that only waits for deletions or acks may yet lose features, but rarely: then its
    tasks are READY again. An offline run never captures."""
    counts = run_rows.counts(conn, facts.run)
    open_tasks = counts.get(TaskState.READY, 0) + counts.get(TaskState.LEASED, 0)
    return not facts.offline and bool(row.ingested < facts.num_tasks or open_tasks > 0)


def serves(worker: fleet.WorkerRow, facts: RunFacts) -> bool:
    """Whether a worker can capture for a run: engine and target fit, and nothing is held against it."""
    return bool(
        worker.engine == facts.contract.engine
        and worker.bound_target in ("", facts.contract.target)
        and not worker.quarantined
        and worker.state != "DRAINING"
    )
