"""Windows in SQL: planned from captured tasks, issued again when features were lost, trained, rendered as step plans."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from sqlalchemy import Connection, Row, case, delete, func, insert, select, update

from specfleet.contracts.states import TaskState
from specfleet.coordinator.facts import RunFacts
from specfleet.coordinator.ledger import hot, outbox
from specfleet.coordinator.ledger.kept import keep
from specfleet.coordinator.ledger.moves import Task, load_by_prompt, load_by_seq, move
from specfleet.coordinator.ledger.tables import runs, samples, tasks, window_members, windows
from specfleet.coordinator.ledger.tasks import CLEARED
from specfleet.policies.windows import Candidate, assign, cut
from specfleet.wire.records_pb2 import MicroBatch, SampleRef, StepPlan

Window = Row[Any]
"""A row of `windows`."""


def planned(conn: Connection, run: int, generation: int) -> list[Window]:
    """Windows of the generation that are not trained yet, ascending step."""
    where = (windows.c.run == run, windows.c.state == "PLANNED", windows.c.generation == generation)
    return list(conn.execute(select(windows).where(*where).order_by(windows.c.step)))


def plan(conn: Connection, facts: RunFacts, now_ms: int) -> list[int]:
    """Cuts windows until `lookahead` of them wait for training; returns the steps that were planned.

    Drops tails where the tail policy says so. Plans nothing beyond the run's last step.
    """
    run = conn.execute(select(runs).where(runs.c.id == facts.run)).one()
    ahead = planned(conn, facts.run, run.generation)
    next_step = (ahead[-1].step if ahead else run.trained_step) + 1
    steps: list[int] = []
    while len(ahead) + len(steps) < facts.config.flow.lookahead:
        # Beyond the last step only the last epoch's tail is left to drop; max_steps skips it (planner).
        beyond = next_step > facts.total_steps
        if beyond and facts.config.trainer.max_steps:
            break
        captured, pending = _candidates(conn, facts)
        chosen = cut(
            captured,
            pending,
            size=facts.config.global_batch,
            order=facts.config.flow.order,
            tail=facts.config.flow.tail,
            next_epoch=run.ingested // facts.num_prompts if run.ingested < facts.num_tasks else None,
        )
        if chosen is None or (beyond and not chosen.dropped):
            break
        if chosen.dropped:
            _drop(conn, facts, [c.seq for c in chosen.dropped], now_ms)
            continue
        _insert(conn, facts, run.generation, next_step, [c.seq for c in chosen.members], run.attached_world, now_ms)
        steps.append(next_step)
        next_step += 1
    return steps


def _candidates(conn: Connection, facts: RunFacts) -> tuple[list[Candidate], list[Candidate]]:
    """Captured tasks outside windows, and the first uncaptured ones: as many as a cut looks at (policies.windows.cut)."""
    size, flow = facts.config.global_batch, facts.config.flow
    columns = select(tasks.c.seq, tasks.c.epoch, tasks.c.arrived_us).where(
        tasks.c.run == facts.run, tasks.c.step.is_(None)
    )
    ready = columns.where(tasks.c.state == str(TaskState.CAPTURED))
    if flow.order == "deterministic":
        ready = ready.order_by(tasks.c.seq).limit(size)
    elif flow.tail == "carry":
        ready = ready.order_by(tasks.c.arrived_us, tasks.c.seq).limit(size)
    captured = [Candidate(row.seq, row.epoch, row.arrived_us) for row in conn.execute(ready)]
    pending: list[Candidate] = []
    for state in (TaskState.READY, TaskState.LEASED):
        query = columns.where(tasks.c.state == str(state)).order_by(tasks.c.seq).limit(size)
        pending += [Candidate(row.seq, row.epoch) for row in conn.execute(query)]
    by_seq = attrgetter("seq")
    return sorted(captured, key=by_seq), sorted(pending, key=by_seq)[:size]


def _drop(conn: Connection, facts: RunFacts, seqs: Sequence[int], now_ms: int) -> None:
    rows = load_by_seq(conn, facts.run, seqs)
    outbox.discard(conn, facts, rows, now_ms)
    move(conn, rows, TaskState.DROPPED_TAIL, "left over at the end of an epoch", **CLEARED)


def _insert(
    conn: Connection, facts: RunFacts, generation: int, step: int, seqs: Sequence[int], world: int, now_ms: int
) -> None:
    rows = {row.seq: row for row in load_by_seq(conn, facts.run, seqs)}
    ordered = [rows[seq] for seq in seqs]
    conn.execute(
        insert(windows),
        [
            {
                "run": facts.run, "generation": generation, "step": step, "epoch": ordered[0].epoch, "world": world,
                "num_samples": len(ordered), "num_tokens": sum(row.num_tokens for row in ordered), "planned_ms": now_ms,
            }
        ],
    )  # fmt: skip
    slots = assign([row.num_tokens for row in ordered], world, facts.config.trainer.batch_size)
    members = [
        _member(ordered[index], generation, step, rank, micro, position)
        for rank, batches in enumerate(slots)
        for micro, batch in enumerate(batches)
        for position, index in enumerate(batch)
    ]
    hot.insert_many(conn, "window_members", _MEMBER, members)
    hot.execute(conn, "UPDATE tasks SET step = ? WHERE run = ? AND seq IN ?list", step, facts.run, hot.Ids(seqs))


_MEMBER = "run, generation, step, seq, epoch, prompt_index, attempt, rank, micro, position"


def _member(row: Task, generation: int, step: int, rank: int, micro: int, position: int) -> tuple[int, ...]:
    return row.run, generation, step, row.seq, row.epoch, row.prompt_index, row.attempt, rank, micro, position


def lose(
    conn: Connection, facts: RunFacts, step: int, lost: Sequence[tuple[int, int, int]], reason: str, now_ms: int
) -> int:
    """Features of (epoch, prompt_index, attempt) are gone: CAPTURED → READY, and their planned window waits. Idempotent."""
    found = load_by_prompt(conn, facts.run, [(epoch, index) for epoch, index, _ in lost])
    rows = [
        row
        for (epoch, index, attempt) in dict.fromkeys(lost)
        if (row := found.get((epoch, index))) is not None
        and row.state == TaskState.CAPTURED
        and row.attempt == attempt
        and row.step == step
    ]
    if rows:
        # Some of the sample's objects may still be there.
        outbox.discard(conn, facts, rows, now_ms)
        move(conn, rows, TaskState.READY, f"features lost: {reason}"[:500], **CLEARED)
        conn.execute(
            update(windows)
            .where(windows.c.run == facts.run, windows.c.state == "PLANNED", windows.c.step == step)
            .values(waiting=1)
        )
    return len(rows)


def mend(conn: Connection, facts: RunFacts, generation: int) -> list[int]:
    """Completes windows that wait for lost features; returns the steps to issue again, each with its revision raised.

    deterministic order: the same prompt is captured again. arrival order: a captured sample takes its place at once. A prompt
    that died meanwhile is replaced, or its place stays empty when no sample will come. Only the places of lost samples
    change: other ranks may already be training theirs.
    """
    mended = []
    where = (windows.c.run == facts.run, windows.c.generation == generation, windows.c.state == "PLANNED")
    for window in conn.execute(select(windows).where(*where, windows.c.waiting == 1).order_by(windows.c.step)).all():
        members = _members(conn, window)
        rows = {row.seq: row for row in load_by_seq(conn, facts.run, [m.seq for m in members])}
        for member in members:
            row = rows[member.seq]
            dead = row.step != window.step
            if dead or (
                facts.config.flow.order == "arrival" and row.state == TaskState.READY and row.dispatched_ms is None
            ):
                _substitute(conn, facts, member, release=None if dead else row)
        if _complete(conn, facts, window):
            mended.append(int(window.step))
    return mended


def _substitute(conn: Connection, facts: RunFacts, member: Any, release: Task | None) -> None:
    """Puts another captured sample in a member's place. release: the member's task, which goes back to the pool."""
    captured, pending = _candidates(conn, facts)
    if facts.config.flow.tail != "carry":
        # An epoch's windows hold that epoch's samples; otherwise its number of windows would change.
        captured = [c for c in captured if c.epoch == member.epoch]
        pending = [c for c in pending if c.epoch == member.epoch]
    key = (
        window_members.c.run == member.run,
        window_members.c.generation == member.generation,
        window_members.c.step == member.step,
        window_members.c.seq == member.seq,
    )
    if captured:
        first = min(captured, key=lambda c: c.arrived) if facts.config.flow.order == "arrival" else captured[0]
        row = load_by_seq(conn, facts.run, [first.seq])[0]
        conn.execute(delete(window_members).where(*key))
        place = _member(row, member.generation, member.step, member.rank, member.micro, member.position)
        hot.insert_many(conn, "window_members", _MEMBER, [place])
        conn.execute(update(tasks).where(tasks.c.run == row.run, tasks.c.seq == row.seq).values(step=member.step))
        if release is not None:
            conn.execute(update(tasks).where(tasks.c.run == row.run, tasks.c.seq == release.seq).values(step=None))
    elif release is None and not pending and _ingested(conn, facts, member.epoch):
        conn.execute(delete(window_members).where(*key))


def _ingested(conn: Connection, facts: RunFacts, epoch: int) -> bool:
    """Whether no more tasks can come that could stand in for one of this epoch."""
    cursor = conn.execute(select(runs.c.ingested).where(runs.c.id == facts.run)).scalar_one()
    last = facts.num_tasks if facts.config.flow.tail == "carry" else (epoch + 1) * facts.num_prompts
    return bool(cursor >= last)


def _members(conn: Connection, window: Any) -> list[Any]:
    sql = f"SELECT {_MEMBER} FROM window_members WHERE run = ? AND generation = ? AND step = ? ORDER BY rank, micro, position"
    return list(hot.execute(conn, sql, window.run, window.generation, window.step))


def _complete(conn: Connection, facts: RunFacts, window: Any) -> bool:
    members = _members(conn, window)
    rows = load_by_seq(conn, facts.run, [m.seq for m in members])
    if any(row.state != TaskState.CAPTURED or row.step != window.step for row in rows):
        return False
    sql = "UPDATE window_members SET attempt = ? WHERE run = ? AND generation = ? AND step = ? AND seq = ?"
    key = (window.run, window.generation, window.step)
    hot.execute_many(conn, sql, [(row.attempt, *key, row.seq) for row in rows])
    conn.execute(
        update(windows)
        .where(windows.c.run == window.run, windows.c.generation == window.generation, windows.c.step == window.step)
        .values(
            waiting=0,
            revision=windows.c.revision + 1,
            num_samples=len(rows),
            num_tokens=sum(row.num_tokens for row in rows),
        )
    )
    return True


def train(conn: Connection, facts: RunFacts, window: Any, now_ms: int) -> int:
    """PLANNED → TRAINED with all its tasks; queues deletions unless features are retained or kept. Returns its tokens."""
    rows = load_by_seq(conn, facts.run, [member.seq for member in _members(conn, window)])
    if not facts.retains:
        outbox.discard(conn, facts, keep(conn, facts, rows), now_ms)
    freed: dict[str, Any] = {} if facts.retains else {"reserved_bytes": None}
    move(conn, rows, TaskState.TRAINED, f"trained in step {window.step} of generation {window.generation}", **freed)
    conn.execute(
        update(windows)
        .where(windows.c.run == window.run, windows.c.generation == window.generation, windows.c.step == window.step)
        .values(state="TRAINED", trained_ms=now_ms)
    )
    conn.execute(
        update(runs)
        .where(runs.c.id == facts.run)
        .values(
            trained_tokens=runs.c.trained_tokens + window.num_tokens,
            trained_step=_larger(runs.c.trained_step, window.step),
            fruitless_launches=0,
            updated_ms=now_ms,
        )
    )
    return int(window.num_tokens)


def _larger(column: Any, value: int) -> Any:
    return case((column > value, column), else_=value)


@dataclass(frozen=True)
class Issue:
    """Plans of one window, one per rank."""

    step: int
    revision: int
    plans: tuple[StepPlan, ...]


def render(conn: Connection, facts: RunFacts, generation: int, steps: Sequence[int] | None = None) -> list[Issue]:
    """Step plans of complete planned windows (all of the generation, or the given steps), from nothing but SQL."""
    issues = []
    for window in planned(conn, facts.run, generation):
        if window.waiting or (steps is not None and window.step not in steps):
            continue
        plans = [
            StepPlan(
                run_id=facts.run_id, generation=generation, step=window.step, rank=rank, world=window.world,
                kind=StepPlan.KIND_STEP, revision=window.revision, epoch=window.epoch,
            )
            for rank in range(window.world)
        ]  # fmt: skip
        for member, ref in _refs(conn, window):
            batches = plans[member.rank].micro_batches
            while len(batches) <= member.micro:
                batches.append(MicroBatch())
            batches[member.micro].samples.append(SampleRef.FromString(ref))
        issues.append(Issue(window.step, window.revision, tuple(plans)))
    return issues


def _refs(conn: Connection, window: Any) -> list[tuple[Any, bytes]]:
    m, s = window_members, samples
    query = (
        select(m.c.rank, m.c.micro, s.c.ref)
        .join(s, (s.c.run == m.c.run) & (s.c.seq == m.c.seq) & (s.c.attempt == m.c.attempt))
        .where(m.c.run == window.run, m.c.generation == window.generation, m.c.step == window.step)
        .order_by(m.c.rank, m.c.micro, m.c.position)
    )
    return [(row, row.ref) for row in conn.execute(query)]


def unfinished(conn: Connection, facts: RunFacts) -> bool:
    """Whether any task may still be trained: not ingested, in flight, captured, or in a planned window."""
    run = conn.execute(select(runs.c.ingested, runs.c.trained_step).where(runs.c.id == facts.run)).one()
    open_windows = select(func.count()).where(windows.c.run == facts.run, windows.c.state == "PLANNED")
    if conn.execute(open_windows).scalar_one():
        return True
    if run.ingested < facts.num_tasks and run.trained_step < facts.total_steps:
        return True
    states = [str(s) for s in (TaskState.READY, TaskState.LEASED, TaskState.CAPTURED)]
    query = select(tasks.c.seq).where(tasks.c.run == facts.run, tasks.c.state.in_(states)).limit(1)
    return conn.execute(query).first() is not None
