"""Features kept for later epochs (flow.reuse_bytes): a trained task leaves them to the same prompt's next epoch.

Kept bytes are a budget of their own beside the credits. A later task takes them over when its turn comes to be dispatched: it
goes through READY → LEASED → CAPTURED like any other, with a sample row that names the old objects, and nothing is published.
"""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, delete, func, insert, select, tuple_

from specfleet.contracts.ids import task_key
from specfleet.contracts.states import TaskState
from specfleet.coordinator.facts import RunFacts
from specfleet.coordinator.ledger.moves import Task, chunks, load_by_seq, move, stamps
from specfleet.coordinator.ledger.tables import kept, outbox, samples
from specfleet.wire.records_pb2 import SampleRef, TaskAttempt


def kept_bytes(conn: Connection, run: int) -> int:
    return int(conn.execute(select(func.coalesce(func.sum(kept.c.num_bytes), 0)).where(kept.c.run == run)).scalar_one())


def keep(conn: Connection, facts: RunFacts, rows: Sequence[Task]) -> list[Task]:
    """Keeps the features of trained tasks as far as the budget goes; returns the rows whose features are to be deleted.

    Last epochs keep nothing, and of two samples of one prompt the first stays.
    """
    budget = facts.config.flow.reuse_bytes
    if not budget:
        return list(rows)
    budget -= kept_bytes(conn, facts.run)
    known = _known(conn, facts.run, [row.prompt_index for row in rows])
    chosen: dict[int, Task] = {}
    for row in rows:
        size = row.reserved_bytes or 0
        if (
            row.epoch + 1 < facts.config.trainer.epochs
            and row.prompt_index not in known | chosen.keys()
            and 0 < size <= budget
        ):
            chosen[row.prompt_index] = row
            budget -= size
    if chosen:
        conn.execute(
            insert(kept),
            [
                {
                    "run": facts.run, "prompt_index": row.prompt_index, "seq": row.seq, "attempt": row.attempt,
                    "num_bytes": row.reserved_bytes,
                }
                for row in chosen.values()
            ],
        )  # fmt: skip
    stays = {row.seq for row in chosen.values()}
    return [row for row in rows if row.seq not in stays]


def _known(conn: Connection, run: int, prompts: Sequence[int]) -> set[int]:
    found: set[int] = set()
    for part in chunks(prompts):
        query = select(kept.c.prompt_index).where(kept.c.run == run, kept.c.prompt_index.in_(part))
        found |= {int(index) for index in conn.execute(query).scalars()}
    return found


def take_over(conn: Connection, facts: RunFacts, rows: Sequence[Task]) -> set[int]:
    """Of these READY tasks, whose credits were just reserved, captures those whose prompt has kept features; returns their
    positions (seq)."""
    if not facts.config.flow.reuse_bytes or not rows:
        return set()
    owners: dict[int, Any] = {}
    for part in chunks([row.prompt_index for row in rows]):
        query = select(kept).where(kept.c.run == facts.run, kept.c.prompt_index.in_(part))
        owners.update({row.prompt_index: row for row in conn.execute(query)})
    heirs: dict[int, Task] = {}
    inheriting: set[int] = set()
    for row in rows:  # of one prompt's tasks in a batch only the first can inherit
        if row.prompt_index in owners and row.prompt_index not in inheriting:
            heirs[row.seq] = row
            inheriting.add(row.prompt_index)
    if not heirs:
        return set()
    current = load_by_seq(conn, facts.run, list(heirs))
    _move_samples(conn, facts, current, owners)
    move(conn, current, TaskState.LEASED, "features of an earlier epoch were kept", dispatched_ms=None)
    current = load_by_seq(conn, facts.run, list(heirs))
    move(conn, current, TaskState.CAPTURED, "captured in an earlier epoch", arrived_us=stamps.take(1)[0])
    return set(heirs)


def _move_samples(conn: Connection, facts: RunFacts, heirs: Sequence[Task], owners: dict[int, Any]) -> None:
    for part in chunks(heirs):
        old = [(owners[row.prompt_index].seq, owners[row.prompt_index].attempt) for row in part]
        where = (samples.c.run == facts.run, tuple_(samples.c.seq, samples.c.attempt).in_(old))
        found = {(row.seq, row.attempt): row for row in conn.execute(select(samples).where(*where))}
        fresh = []
        for row in part:
            owner = owners[row.prompt_index]
            sample = found[owner.seq, owner.attempt]
            ref = SampleRef.FromString(sample.ref)
            task = task_key(facts.run_id, row.epoch, row.prompt_index)
            ref.attempt.CopyFrom(TaskAttempt(task=task, attempt=row.attempt))
            fresh.append({**sample._mapping, "seq": row.seq, "attempt": row.attempt, "ref": ref.SerializeToString()})
        conn.execute(delete(samples).where(*where))
        conn.execute(insert(samples), fresh)
        conn.execute(
            delete(kept).where(kept.c.run == facts.run, kept.c.prompt_index.in_([row.prompt_index for row in part]))
        )


def drop(conn: Connection, facts: RunFacts, now_ms: int) -> int:
    """The run will train nothing more: queues the deletion of what is still kept. Returns how many samples that was."""
    of = (samples.c.run == kept.c.run) & (samples.c.seq == kept.c.seq) & (samples.c.attempt == kept.c.attempt)
    query = select(kept, samples.c.store, samples.c.ref).join(samples, of).where(kept.c.run == facts.run)
    rows = conn.execute(query).all()
    if rows:
        conn.execute(
            insert(outbox),
            [
                {
                    "run": row.run, "seq": row.seq, "attempt": row.attempt, "store": row.store, "num_bytes": row.num_bytes,
                    "keys": "\n".join(feature.key for feature in SampleRef.FromString(row.ref).features),
                    "created_ms": now_ms,
                }
                for row in rows
            ],
        )  # fmt: skip
        conn.execute(delete(kept).where(kept.c.run == facts.run))
    return len(rows)
