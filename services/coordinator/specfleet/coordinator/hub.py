"""What the services and loops share: ledger, bus, caches, and the events that wake the loops. Holds no truth."""

import asyncio
import time
from collections import defaultdict
from dataclasses import dataclass

import structlog
from sqlalchemy import Connection

from specfleet.bus.base import Bus
from specfleet.contracts.ids import events_subject
from specfleet.contracts.states import RunState
from specfleet.coordinator.facts import RunFacts
from specfleet.coordinator.features import FeatureSets
from specfleet.coordinator.ledger import Ledger
from specfleet.coordinator.ledger import runs as run_rows
from specfleet.coordinator.prompts import PromptSets
from specfleet.coordinator.rates import Rates
from specfleet.policies.credits import CreditGate, Marks, derive_marks
from specfleet.wire.records_pb2 import Event

log = structlog.get_logger()

HEARTBEAT_S = 2.0
# Five missed beats and a margin: on a busy two-core machine a process may be held up for seconds.
LOST_AFTER_MS = 15_000
# Events nobody reads must not pile up while the bus is away.
MAX_QUEUED_EVENTS = 1_000


def now_ms() -> int:
    return time.time_ns() // 1_000_000


class Wake:
    """An event with a slow tick: `wait` returns when set or when tick_s have passed, and clears itself."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def set(self) -> None:
        self._event.set()

    async def wait(self, tick_s: float) -> None:
        if tick_s <= 0:
            return
        try:
            async with asyncio.timeout(tick_s):
                await self._event.wait()
        except TimeoutError:
            return
        finally:
            self._event.clear()


@dataclass
class Pool:
    """One store as its workers report it."""

    name: str
    capacity_bytes: int


class Hub:
    def __init__(self, ledger: Ledger, bus: Bus) -> None:
        self.ledger = ledger
        self.bus = bus
        self.prompts = PromptSets()
        self.features = FeatureSets()
        self.dispatch, self.plan, self.outbox, self.care = Wake(), Wake(), Wake(), Wake()
        self.rates: defaultdict[int, Rates] = defaultdict(Rates)
        self.gates: defaultdict[int, CreditGate] = defaultdict(CreditGate)
        self.pools: dict[str, Pool] = {}
        self.sharing: dict[str, int] = {}
        """Active runs per store."""
        self.claimed_ms: defaultdict[str, int] = defaultdict(now_ms)
        """Contract hash → when a prompt of it was last claimed; starts when first asked for."""
        self.events: asyncio.Queue[Event] = asyncio.Queue(MAX_QUEUED_EVENTS)
        self._facts: dict[int, RunFacts] = {}

    async def facts_of(self, run_id: str) -> RunFacts:
        """Raises DataError SF-RUN-NOT-FOUND."""
        for known in self._facts.values():
            if known.run_id == run_id:
                return known
        return self.facts(await self.ledger.read(lambda conn: run_rows.find(conn, run_id)))

    def facts(self, row: run_rows.RunRow) -> RunFacts:
        if row.id not in self._facts:
            self._facts[row.id] = RunFacts.of(row)
        return self._facts[row.id]

    def forget_facts(self, run: int) -> None:
        """The run's configuration changed."""
        self._facts.pop(run, None)

    def marks(self, facts: RunFacts, store: str) -> Marks | None:
        """None until a worker has reported the pool."""
        flow = facts.config.flow
        if facts.offline:
            return Marks(0, 0, flow.low_samples, flow.high_samples)
        pool = self.pools.get(store)
        if pool is None or pool.capacity_bytes == 0:
            return None
        return derive_marks(
            high_bytes=flow.high_bytes,
            low_bytes=flow.low_bytes,
            high_samples=flow.high_samples,
            low_samples=flow.low_samples,
            # What is kept for later epochs is not there for what is in flight.
            capacity_bytes=max(0, pool.capacity_bytes - flow.reuse_bytes),
            sharing=self.sharing.get(store, 1),
        )

    def set_state(self, conn: Connection, row: run_rows.RunRow, to: RunState, reason: str = "") -> bool:
        """As ledger.runs.set_state, and tells the world. Inside a write."""
        changed = run_rows.set_state(conn, row.id, to, reason, now_ms())
        if changed and (row.state != to):
            log.info("run changed state", run=row.run_id, old=row.state, new=str(to), reason=reason)
            self.tell(row.run_id, "state", f"{row.state} → {to}" + (f": {reason}" if reason else ""))
        return changed

    def pause(self, conn: Connection, row: run_rows.RunRow, reason: str) -> None:
        """As if the user had: ranks write a checkpoint and leave, and the run waits for `specctl run resume`. Inside a write."""
        run_rows.set_values(conn, row.id, wanted="pause")
        self.set_state(conn, row, RunState.PAUSED, reason)

    def tell(self, run_id: str, kind: str, message: str) -> None:
        """Queues an event for EVENTS; safe from the ledger's writer thread. Dropped when the bus has been away for long."""
        event = Event(run_id=run_id, kind=kind, at_unix_ms=now_ms(), service="coordinator", message=message)
        self._loop.call_soon_threadsafe(self._queue_event, event)

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def _queue_event(self, event: Event) -> None:
        if not self.events.full():
            self.events.put_nowait(event)

    async def publish_events(self) -> None:
        """For ever."""
        while True:
            event = await self.events.get()
            await self.bus.publish(events_subject(event.run_id, event.kind), event.SerializeToString())
