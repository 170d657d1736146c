"""Cuts windows and publishes step plans; announces the end of a run and its interruptions."""

from dataclasses import dataclass, field

import structlog
from sqlalchemy import Connection

from specfleet.contracts.ids import steps_subject
from specfleet.contracts.states import RunState
from specfleet.coordinator.facts import RunFacts
from specfleet.coordinator.hub import Hub, now_ms
from specfleet.coordinator.ledger import runs as run_rows
from specfleet.coordinator.ledger import tasks as task_rows
from specfleet.coordinator.ledger import windows as window_rows
from specfleet.wire.records_pb2 import StepPlan

log = structlog.get_logger()

TICK_S = 1.0


@dataclass
class _Outcome:
    generation: int = 0
    world: int = 0
    next_step: int = 0
    issues: list[window_rows.Issue] = field(default_factory=list)
    finished: bool = False


class Planner:
    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._announced: set[tuple[int, int, str]] = set()
        """(run, generation, END or STOP) already published by this process."""
        self._republished: dict[int, int] = {}
        """run → generation whose plans this process has published."""

    async def one_pass(self) -> None:
        for row in await self._hub.ledger.read(run_rows.every):
            if not row.attached_world:
                continue
            facts = self._hub.facts(row)
            if row.wanted != "run" or row.state in (RunState.FAILED, RunState.CANCELLED):
                await self._stop(facts, row)
            elif not row.final:
                await self._advance(facts)

    def forget(self) -> None:
        """The bus lost messages: everything current is published again at the next pass."""
        self._announced.clear()
        self._republished.clear()

    async def _advance(self, facts: RunFacts) -> None:
        outcome = await self._hub.ledger.write(lambda conn: self._decide(conn, facts))
        if outcome.issues:
            await self._publish(facts, outcome)
            self._hub.dispatch.set()
        self._republished[facts.run] = outcome.generation
        if outcome.finished:
            await self._announce(facts, outcome, StepPlan.KIND_END, "")

    def _decide(self, conn: Connection, facts: RunFacts) -> _Outcome:
        row = run_rows.get(conn, facts.run)
        if not row.attached_world:
            return _Outcome()
        steps = window_rows.mend(conn, facts, row.generation) + window_rows.plan(conn, facts, now_ms())
        open_windows = window_rows.planned(conn, facts.run, row.generation)
        last = int(open_windows[-1].step) if open_windows else int(row.trained_step)
        if facts.config.trainer.max_steps and last >= facts.total_steps:
            # Everything that will be trained is in a window.
            task_rows.skip_rest(conn, facts, "max_steps", now_ms())
        fresh = self._republished.get(facts.run) != row.generation
        return _Outcome(
            row.generation,
            row.attached_world,
            last + 1,
            window_rows.render(conn, facts, row.generation, None if fresh else steps) if fresh or steps else [],
            not open_windows and not window_rows.unfinished(conn, facts),
        )

    async def _publish(self, facts: RunFacts, outcome: _Outcome) -> None:
        messages = []
        for issue in outcome.issues:
            for plan in issue.plans:
                name = f"{facts.run_id}/g{outcome.generation}/s{issue.step}/r{plan.rank}/v{issue.revision}"
                subject = steps_subject(facts.run_id, outcome.generation, plan.rank)
                messages.append((subject, plan.SerializeToString(), name))
        await self._hub.bus.publish_many(messages)

    async def _stop(self, facts: RunFacts, row: run_rows.RunRow) -> None:
        reason = {"pause": row.reason, "cancel": "cancelled"}.get(row.wanted, f"run is {row.state}: {row.reason}")

        def last_step(conn: Connection) -> int:
            open_windows = window_rows.planned(conn, facts.run, row.generation)
            return int(open_windows[-1].step) if open_windows else int(row.trained_step)

        step = await self._hub.ledger.read(last_step)
        outcome = _Outcome(row.generation, row.attached_world, step + 1)
        await self._announce(facts, outcome, StepPlan.KIND_STOP, reason)

    async def _announce(self, facts: RunFacts, outcome: _Outcome, kind: "StepPlan.Kind", reason: str) -> None:
        name = "end" if kind == StepPlan.KIND_END else "stop"
        key = (facts.run, outcome.generation, name)
        if key in self._announced:
            return
        messages = []
        for rank in range(outcome.world):
            plan = StepPlan(
                run_id=facts.run_id, generation=outcome.generation, step=outcome.next_step, rank=rank, world=outcome.world,
                kind=kind, reason=reason,
            )  # fmt: skip
            subject = steps_subject(facts.run_id, outcome.generation, rank)
            messages.append((subject, plan.SerializeToString(), f"{facts.run_id}/g{outcome.generation}/{name}/r{rank}"))
        await self._hub.bus.publish_many(messages)
        self._announced.add(key)
        log.info("announced", run=facts.run_id, generation=outcome.generation, kind=name, step=outcome.next_step)
