"""A claimed task: its lease, the heartbeats that renew it, and how an attempt ends without a sample."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, func, select, update

from specfleet.contracts.states import TaskState
from specfleet.coordinator.facts import RunFacts
from specfleet.coordinator.ledger import hot, outbox
from specfleet.coordinator.ledger.moves import Task, chunks, load_by_prompt, move
from specfleet.coordinator.ledger.tables import tasks
from specfleet.coordinator.ledger.tasks import CLEARED
from specfleet.policies.retries import Failure, judge


@dataclass(frozen=True)
class Claim:
    accepted: bool
    deadline_ms: int = 0
    reason: str = ""


def claim(
    conn: Connection, facts: RunFacts, worker: str, attempts: Sequence[tuple[int, int, int]], now_ms: int
) -> list[Claim]:
    """Compare-and-set READY → LEASED for (epoch, prompt_index, attempt) each. Repeating a claim renews it."""
    found = load_by_prompt(conn, facts.run, [(epoch, index) for epoch, index, _ in attempts])
    deadline = facts.lease.deadline_ms(now_ms)
    fresh: list[Task] = []
    answers: list[Claim] = []
    for epoch, index, attempt in attempts:
        row = found.get((epoch, index))
        if row is None or row.attempt != attempt:
            current = "unknown" if row is None else f"at attempt {row.attempt}"
            answers.append(Claim(False, reason=f"stale: the task is {current}"))
        elif row.state == TaskState.READY and row.dispatched_ms is not None:
            fresh.append(row)
            answers.append(Claim(True, deadline))
        elif row.state == TaskState.LEASED and row.worker == worker:
            answers.append(Claim(True, deadline))
        else:
            answers.append(
                Claim(False, reason=f"the task is {row.state}" + (f", leased to {row.worker}" if row.worker else ""))
            )
    move(
        conn,
        _unique(fresh),
        TaskState.LEASED,
        f"claimed by {worker}",
        worker=worker,
        lease_ms=deadline,
        dispatched_ms=None,
    )
    accepted = {found[e, i].seq for (e, i, _), a in zip(attempts, answers, strict=True) if a.accepted}
    _renew(conn, facts.run, sorted(accepted - {row.seq for row in fresh}), deadline)
    return answers


def _unique(rows: Iterable[Task]) -> list[Task]:
    return list({row.seq: row for row in rows}.values())


def _renew(conn: Connection, run: int, seqs: Sequence[int], deadline_ms: int) -> None:
    if seqs:
        sql = "UPDATE tasks SET lease_ms = ? WHERE run = ? AND seq IN ?list AND state = ?"
        hot.execute(conn, sql, deadline_ms, run, hot.Ids(seqs), str(TaskState.LEASED))


def renew(
    conn: Connection, facts: RunFacts, worker: str, attempts: Sequence[tuple[int, int, int]], now_ms: int
) -> list[tuple[int, int, int]]:
    """Renews the leases a worker still works on; returns those it has lost."""
    found = load_by_prompt(conn, facts.run, [(epoch, index) for epoch, index, _ in attempts])
    kept: list[int] = []
    revoked: list[tuple[int, int, int]] = []
    for epoch, index, attempt in attempts:
        row = found.get((epoch, index))
        if row is not None and row.attempt == attempt and row.state == TaskState.LEASED and row.worker == worker:
            kept.append(row.seq)
        # A sample that is already counted is not revoked: the worker merely has not heard of it yet.
        elif row is None or row.attempt != attempt or row.state in (TaskState.READY, TaskState.LEASED, TaskState.DEAD):
            revoked.append((epoch, index, attempt))
    _renew(conn, facts.run, kept, facts.lease.deadline_ms(now_ms))
    return revoked


def fail(
    conn: Connection, facts: RunFacts, worker: str, failures: Sequence[tuple[int, int, int, Failure, str]], now_ms: int
) -> bool:
    """(epoch, prompt_index, attempt, class, reason) each. Returns whether the worker's breaker is charged."""
    found = load_by_prompt(conn, facts.run, [(epoch, index) for epoch, index, *_ in failures])
    blamed = False
    for epoch, index, attempt, failure, reason in failures:
        row = found.get((epoch, index))
        if row is None or row.attempt != attempt or row.state != TaskState.LEASED or row.worker != worker:
            continue
        if failure is Failure.INFRA:
            # A server whose answer was lost may have stored everything.
            outbox.discard(conn, facts, [row], now_ms)
        verdict = judge(failure, row.failures, facts.config.flow.sample_budget)
        blamed = blamed or verdict.blames_worker
        finish_attempt(
            conn, facts, [row], verdict.state, f"{failure} on {worker}: {reason}"[:500], failures=verdict.failures
        )
    return blamed


def finish_attempt(
    conn: Connection, facts: RunFacts, rows: Sequence[Task], to: TaskState, detail: str, **values: Any
) -> None:
    """Ends the current attempts of LEASED (or CAPTURED) tasks without a sample; `to` is READY or DEAD."""
    reason = detail if to is TaskState.DEAD else ""
    move(conn, rows, to, detail, **{**CLEARED, "reason": reason, **values})
    if to is TaskState.DEAD:
        # A dead prompt no longer belongs to a window: the planner puts another sample in its place.
        for part in chunks([row.seq for row in rows]):
            conn.execute(update(tasks).where(tasks.c.run == facts.run, tasks.c.seq.in_(part)).values(step=None))


def expire(conn: Connection, facts: RunFacts, now_ms: int, *, workers: Sequence[str] = (), limit: int = 1_000) -> int:
    """Takes back leases that are over, and every lease of `workers` (they are gone). Returns how many.

    What the attempt may have written is deleted: its keys are known, and a late writer's sample is refused.
    """
    over = tasks.c.lease_ms < now_ms
    if workers:
        over = over | tasks.c.worker.in_(workers)
    where = (tasks.c.run == facts.run, tasks.c.lease_ms.is_not(None), over)
    rows = conn.execute(select(tasks).where(*where).limit(limit)).all()
    outbox.discard(conn, facts, rows, now_ms)
    move(conn, rows, TaskState.READY, "lease expired", **CLEARED)
    return len(rows)


def extend_after_restart(conn: Connection, facts: RunFacts, now_ms: int) -> None:
    """Gives every lease a full term: while the coordinator was away nobody could renew."""
    deadline = facts.lease.restart_deadline_ms(0, now_ms)
    where = (tasks.c.run == facts.run, tasks.c.lease_ms.is_not(None), tasks.c.lease_ms < deadline)
    conn.execute(update(tasks).where(*where).values(lease_ms=deadline))


def leased(conn: Connection, run: int) -> int:
    where = (tasks.c.run == run, tasks.c.state == str(TaskState.LEASED))
    return int(conn.execute(select(func.count()).where(*where)).scalar_one())
