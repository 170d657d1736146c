"""A task's life before it is captured: ingested, dispatched, claimed, and every way back to READY."""

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, func, insert, select, update

from specfleet.contracts.states import TaskState
from specfleet.coordinator.facts import RunFacts
from specfleet.coordinator.ledger import hot, kept, offline, outbox
from specfleet.coordinator.ledger.moves import Task, chunks, count, load_by_prompt, load_by_seq, move, record
from specfleet.coordinator.ledger.tables import runs, task_counts, tasks, windows
from specfleet.features.feature_set import FeatureSet
from specfleet.policies.credits import CreditGate, Held, Marks

# What a task that goes back to READY no longer has.
CLEARED: Mapping[str, Any] = {
    "reserved_bytes": None, "dispatched_ms": None, "lease_ms": None, "worker": None, "arrived_us": None
}  # fmt: skip

_RECORDED = "recorded by an earlier run"


def ingest(
    conn: Connection,
    facts: RunFacts,
    prompts: Sequence[tuple[int, int, int]],
    first_seq: int,
    recorded: Container[int] = frozenset(),
) -> int:
    """Adds tasks (epoch, prompt_index, num_tokens) at positions first_seq, …; returns the new cursor.

    recorded: prompts that the feature set of a recording run has already; their tasks are SKIPPED at once.
    Does nothing when the cursor is elsewhere: another call was faster.
    """
    cursor = conn.execute(select(runs.c.ingested).where(runs.c.id == facts.run)).scalar_one()
    if cursor != first_seq or not prompts:
        return int(cursor)
    for epoch in sorted({epoch for epoch, _, _ in prompts}):
        where = (task_counts.c.run == facts.run, task_counts.c.epoch == epoch)
        if conn.execute(select(func.count()).where(*where)).scalar_one() == 0:
            conn.execute(
                insert(task_counts), [{"run": facts.run, "epoch": epoch, "state": str(s), "n": 0} for s in TaskState]
            )
    rows = [(facts.run, first_seq + i, *prompt) for i, prompt in enumerate(prompts)]
    hot.insert_many(conn, "tasks", "run, seq, epoch, prompt_index, num_tokens", rows)
    count(conn, facts.run, Counter((epoch, str(TaskState.READY)) for epoch, _, _ in prompts))
    known = load_by_prompt(conn, facts.run, [(epoch, index) for epoch, index, _ in prompts if index in recorded])
    move(conn, list(known.values()), TaskState.SKIPPED, _RECORDED, reason=_RECORDED)
    cursor = first_seq + len(prompts)
    conn.execute(update(runs).where(runs.c.id == facts.run).values(ingested=cursor))
    return cursor


def held(conn: Connection, run: int) -> Held:
    """Reserved bytes and samples of a run, deletions that are not confirmed included in the bytes."""
    query = select(func.count(), func.coalesce(func.sum(tasks.c.reserved_bytes), 0))
    row = conn.execute(query.where(tasks.c.run == run, tasks.c.reserved_bytes.is_not(None))).one()
    return Held(int(row[1]) + outbox.open_rows(conn, run)[1], int(row[0]))


@dataclass(frozen=True)
class Dispatched:
    epoch: int
    prompt_index: int
    attempt: int
    reserved_bytes: int
    taken_over: bool = False
    """Its features are there already: those an earlier epoch left, or those of a feature set."""


def dispatch(
    conn: Connection,
    facts: RunFacts,
    gate: CreditGate,
    marks: Marks,
    pool_free_bytes: int,
    limit: int,
    now_ms: int,
    features: FeatureSet | None = None,
) -> list[Dispatched]:
    """Reserves credits for the next READY tasks in order, raises their attempt and marks them dispatched.

    Announce them only after this is committed, and not those that took over features.
    pool_free_bytes: what all runs together may still reserve in the pool. features: the set an offline run trains from.
    """
    query = (
        select(tasks)
        .where(tasks.c.run == facts.run, tasks.c.state == str(TaskState.READY), tasks.c.dispatched_ms.is_(None))
        .order_by(tasks.c.seq)
        .limit(limit)
    )
    waiting = conn.execute(query).all()
    if not waiting:
        return []
    front = _front(conn, facts.run)
    now_held = held(conn, facts.run)
    chosen: list[Task] = []
    for row in waiting:
        size = row.num_tokens * facts.bytes_per_token
        if size > pool_free_bytes or not gate.admit(marks, now_held, size, urgent=row.seq < front):
            break
        now_held = Held(now_held.num_bytes + size, now_held.num_samples + 1)
        pool_free_bytes -= size
        chosen.append(row)
    if chosen:
        sql = (
            "UPDATE tasks SET attempt = attempt + 1, dispatched_ms = ?, reserved_bytes = num_tokens * ? "
            "WHERE run = ? AND seq IN ?list"
        )
        seqs = hot.Ids(row.seq for row in chosen)
        hot.execute(conn, sql, now_ms, facts.bytes_per_token, facts.run, seqs)
    record(conn, chosen, str(TaskState.READY), "dispatched", attempt_delta=1)
    current = load_by_seq(conn, facts.run, [row.seq for row in chosen])
    captured = (
        offline.take(conn, facts, features, current, now_ms) if features else kept.take_over(conn, facts, current)
    )
    return [
        Dispatched(
            row.epoch, row.prompt_index, row.attempt + 1, row.num_tokens * facts.bytes_per_token, row.seq in captured
        )
        for row in chosen
    ]


def _front(conn: Connection, run: int) -> int:
    """Position below which a READY task is a hole: something later already holds credits, so an earlier window waits for it."""
    query = select(func.max(tasks.c.seq)).where(tasks.c.run == run, tasks.c.reserved_bytes.is_not(None))
    return int(conn.execute(query).scalar() or 0)


def evict(conn: Connection, facts: RunFacts, gate: CreditGate, marks: Marks, now_ms: int) -> int:
    """Frees credits when the head of the run waits for them in vain; returns how many captured samples were given up.

    After a restore the tasks to repeat come before samples that are already captured and hold every credit. When nothing else
    is in flight that could free any, the samples furthest from their window go back to READY.
    """
    ready = select(tasks).where(
        tasks.c.run == facts.run, tasks.c.state == str(TaskState.READY), tasks.c.dispatched_ms.is_(None)
    )
    head = conn.execute(ready.order_by(tasks.c.seq).limit(1)).first()
    if head is None or _moving(conn, facts.run):
        return 0
    now_held, size = held(conn, facts.run), head.num_tokens * facts.bytes_per_token
    if gate.admit(marks, now_held, size, urgent=True):
        return 0
    spare = (
        select(tasks)
        .where(
            tasks.c.run == facts.run,
            tasks.c.state == str(TaskState.CAPTURED),
            tasks.c.step.is_(None),
            tasks.c.seq > head.seq,
        )
        .order_by(tasks.c.seq.desc())
        .limit(facts.config.global_batch)
    )
    rows = conn.execute(spare).all()
    outbox.discard(conn, facts, rows, now_ms)
    move(conn, rows, TaskState.READY, "given up to make room for an earlier prompt", **CLEARED)
    return len(rows)


def _moving(conn: Connection, run: int) -> bool:
    """Whether a capture, a complete window or a deletion is under way that will free or use credits by itself."""
    flying = select(func.count()).where(tasks.c.run == run, tasks.c.dispatched_ms.is_not(None))
    leased = select(func.count()).where(tasks.c.run == run, tasks.c.state == str(TaskState.LEASED))
    planned = select(func.count()).where(windows.c.run == run, windows.c.state == "PLANNED", windows.c.waiting == 0)
    return outbox.open_rows(conn, run)[0] > 0 or any(
        conn.execute(query).scalar_one() for query in (flying, leased, planned)
    )


def unclaimed(conn: Connection, run: int, before_ms: int) -> tuple[int, int]:
    """(published and not claimed, of these published before before_ms)."""
    where = (tasks.c.run == run, tasks.c.dispatched_ms.is_not(None))
    total = conn.execute(select(func.count()).where(*where)).scalar_one()
    old = (
        conn.execute(select(func.count()).where(*where, tasks.c.dispatched_ms < before_ms)).scalar_one() if total else 0
    )
    return int(total), int(old)


def recall(conn: Connection, run: int, before_ms: int) -> int:
    """Forgets publications older than before_ms: their messages are lost. The dispatcher publishes the tasks again.

    The next dispatch raises the attempt, so a message that turns up after all is refused at its claim.
    """
    where = (tasks.c.run == run, tasks.c.dispatched_ms.is_not(None), tasks.c.dispatched_ms < before_ms)
    rows = conn.execute(select(tasks).where(*where)).all()
    for part in chunks([row.seq for row in rows]):
        conn.execute(
            update(tasks)
            .where(tasks.c.run == run, tasks.c.seq.in_(part))
            .values(dispatched_ms=None, reserved_bytes=None)
        )
    record(conn, rows, str(TaskState.READY), "message lost")
    return len(rows)


def skip_rest(conn: Connection, facts: RunFacts, reason: str, now_ms: int, *, limit: int = 2_000) -> int:
    """Ends tasks that will not be trained: READY, LEASED or CAPTURED and in no window → SKIPPED(reason). Returns how many."""
    states = [str(s) for s in (TaskState.READY, TaskState.LEASED, TaskState.CAPTURED)]
    where = (tasks.c.run == facts.run, tasks.c.state.in_(states), tasks.c.step.is_(None))
    rows = conn.execute(select(tasks).where(*where).limit(limit)).all()
    busy = [row for row in rows if row.state != TaskState.READY]
    outbox.discard(conn, facts, busy, now_ms)
    move(conn, busy, TaskState.READY, reason, **CLEARED)
    rows = load_by_seq(conn, facts.run, [row.seq for row in rows])
    move(conn, rows, TaskState.SKIPPED, reason, **{**CLEARED, "reason": reason})
    return len(rows)


def purge(conn: Connection, facts: RunFacts, reason: str, now_ms: int) -> int:
    """A run that is over gives everything back that is in no window of a live generation. Returns how many tasks changed."""
    attached = conn.execute(select(runs.c.attached_world).where(runs.c.id == facts.run)).scalar_one()
    if not attached:
        conn.execute(
            update(windows).where(windows.c.run == facts.run, windows.c.state == "PLANNED").values(state="ABANDONED")
        )
        open_states = [str(s) for s in (TaskState.READY, TaskState.LEASED, TaskState.CAPTURED)]
        where = (tasks.c.run == facts.run, tasks.c.state.in_(open_states), tasks.c.step.is_not(None))
        conn.execute(update(tasks).where(*where).values(step=None))
    changed = skip_rest(conn, facts, reason, now_ms)
    if not attached:
        changed += kept.drop(conn, facts, now_ms)
        held_on = (
            tasks.c.run == facts.run,
            tasks.c.state == str(TaskState.TRAINED),
            tasks.c.reserved_bytes.is_not(None),
        )
        rows = conn.execute(select(tasks).where(*held_on)).all()
        outbox.discard(conn, facts, rows, now_ms)
        for part in chunks([row.seq for row in rows]):
            conn.execute(
                update(tasks).where(tasks.c.run == facts.run, tasks.c.seq.in_(part)).values(reserved_bytes=None)
            )
        changed += len(rows)
    return changed
