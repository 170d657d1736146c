"""Notices that the bus lost messages, and has them published again. The ledger knows what should be there."""

import structlog
from sqlalchemy import Connection

from specfleet.coordinator.facts import RunFacts
from specfleet.coordinator.hub import Hub, now_ms
from specfleet.coordinator.ledger import leases
from specfleet.coordinator.ledger import runs as run_rows
from specfleet.coordinator.ledger import tasks as task_rows
from specfleet.coordinator.ledger import windows as window_rows
from specfleet.coordinator.loops.planner import Planner

log = structlog.get_logger()

# A message is published after its commit; younger ones may still be on their way.
SETTLE_MS = 3_000
# Without any claim or lease for this long, prompts on the queue are not being delivered.
REDISPATCH_MS = 60_000


class Losses:
    def __init__(self, hub: Hub, planner: Planner) -> None:
        self._hub = hub
        self._planner = planner

    async def one_pass(self) -> None:
        await self._prompts()
        await self._steps()

    async def _prompts(self) -> None:
        """A work queue holds every message until it is acked, so fewer messages than unclaimed prompts prove a loss."""
        now = now_ms()

        def unclaimed(conn: Connection) -> dict[RunFacts, tuple[int, int, int]]:
            rows = [self._hub.facts(row) for row in run_rows.active(conn)]
            return {
                facts: (*task_rows.unclaimed(conn, facts.run, now - SETTLE_MS), leases.leased(conn, facts.run))
                for facts in rows
            }

        found = await self._hub.ledger.read(unclaimed)
        if not any(old for _, old, _ in found.values()):
            return
        queued = (await self._hub.bus.stream_info("PROMPTS")).messages
        lost = queued < sum(total for total, _, _ in found.values())
        busy = {facts.contract_hash for facts, (_, _, leased) in found.items() if leased}
        for facts, (_, old, _) in found.items():
            idle_ms = now - self._hub.claimed_ms[facts.contract_hash]
            stuck = facts.contract_hash not in busy and idle_ms > REDISPATCH_MS
            if not old or not (lost or stuck):
                continue
            horizon = now - (SETTLE_MS if lost else REDISPATCH_MS)
            n = await self._recall(facts, horizon)
            if n:
                log.warning(
                    "prompts are published again", run=facts.run_id, prompts=n, queued=queued, idle_s=idle_ms / 1000
                )
                self._hub.claimed_ms[facts.contract_hash] = now
                self._hub.dispatch.set()

    async def _recall(self, facts: RunFacts, horizon_ms: int) -> int:
        return await self._hub.ledger.write(lambda conn: task_rows.recall(conn, facts.run, horizon_ms))

    async def _steps(self) -> None:
        """Plans stay in STEPS until they are old: fewer than those not trained yet prove a loss."""

        def expected(conn: Connection) -> int:
            total = 0
            for row in run_rows.active(conn):
                if row.attached_world:
                    settled = now_ms() - SETTLE_MS
                    plans = window_rows.planned(conn, row.id, row.generation)
                    total += row.attached_world * sum(1 for w in plans if not w.waiting and w.planned_ms < settled)
            return total

        wanted = await self._hub.ledger.read(expected)
        if wanted and (await self._hub.bus.stream_info("STEPS")).messages < wanted:
            log.warning("the bus lost step plans; they are published again", wanted=wanted)
            self._planner.forget()
            self._hub.plan.set()
