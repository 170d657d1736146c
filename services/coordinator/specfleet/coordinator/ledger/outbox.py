"""Deletions that are due. Written in the transaction that makes an object useless; gone when a worker confirms them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, bindparam, delete, func, insert, select, update

from specfleet.contracts.ids import feature_key, task_key
from specfleet.coordinator.facts import RunFacts
from specfleet.coordinator.ledger.moves import Task, chunks
from specfleet.coordinator.ledger.tables import outbox, runs, samples
from specfleet.wire.records_pb2 import Release, SampleRef, TaskAttempt

PUBLISH_BATCH = 512


@dataclass(frozen=True)
class Due:
    """One release to publish; `message_id` differs for every publication, so that the bus does not drop a repetition."""

    release: Release
    message_id: str


def attempt_keys(facts: RunFacts, store: str, epoch: int, prompt_index: int, attempt: int) -> list[str]:
    """Every key the attempt can have written, whether or not it got that far."""
    named = TaskAttempt(task=task_key(facts.run_id, epoch, prompt_index), attempt=attempt)
    return [feature_key(store, named, feature) for feature in facts.features]


def discard(conn: Connection, facts: RunFacts, rows: Sequence[Task], now_ms: int) -> None:
    """Queues the deletion of what the current attempts of these tasks wrote or may have written. Their bytes move along:
    the caller sets tasks.reserved_bytes to NULL in the same transaction."""
    stored = _stored(conn, facts.run, rows, keys=facts.config.flow.reuse_bytes > 0)
    fallback = conn.execute(_RUN_STORE, {"run": facts.run}).scalar_one()
    entries = []
    for row in rows:
        store, keys = stored.get((row.seq, row.attempt), (fallback, []))
        if not store:
            continue
        keys = keys or attempt_keys(facts, store, row.epoch, row.prompt_index, row.attempt)
        entries.append(
            {
                "run": row.run, "seq": row.seq, "attempt": row.attempt, "store": store, "keys": "\n".join(keys),
                "num_bytes": row.reserved_bytes or 0, "created_ms": now_ms,
            }
        )  # fmt: skip
    if entries:
        conn.execute(insert(outbox), entries)


def discard_keys(conn: Connection, run: int, store: str, keys: Iterable[str], now_ms: int) -> None:
    """Queues the deletion of objects nobody counts: a stale attempt, or a run that is gone (run 0)."""
    entry = {
        "run": run,
        "seq": -1,
        "attempt": 0,
        "store": store,
        "keys": "\n".join(keys),
        "num_bytes": 0,
        "created_ms": now_ms,
    }
    conn.execute(insert(outbox), [entry])


def _stored(
    conn: Connection, run: int, rows: Sequence[Task], *, keys: bool
) -> dict[tuple[int, int], tuple[str, list[str]]]:
    """(seq, attempt) → the store of its sample and, when asked for, its keys: an attempt that took over the features of an
    earlier epoch wrote none under its own name."""
    found: dict[tuple[int, int], tuple[str, list[str]]] = {}
    columns = (samples.c.seq, samples.c.attempt, samples.c.store, *([samples.c.ref] if keys else []))
    for part in chunks([row.seq for row in rows]):
        for row in conn.execute(select(*columns).where(samples.c.run == run, samples.c.seq.in_(part))):
            names = [feature.key for feature in SampleRef.FromString(row.ref).features] if keys else []
            found[row.seq, row.attempt] = (row.store, names)
    return found


def due(conn: Connection, now_ms: int, republish_ms: int) -> list[Due]:
    """Marks rows never published, or published and unconfirmed for republish_ms, as published now; returns them."""
    query = (
        select(outbox)
        .where(outbox.c.published_ms <= max(0, now_ms - republish_ms))
        .order_by(outbox.c.id)
        .limit(PUBLISH_BATCH)
    )
    rows = conn.execute(query).all()
    if rows:
        conn.execute(_PUBLISHED, [{"b_id": row.id, "b_now": now_ms} for row in rows])
    return [
        Due(
            Release(outbox_id=row.id, store=row.store, keys=row.keys.split("\n"), num_bytes=row.num_bytes),
            f"outbox/{row.id}/{row.publications + 1}",
        )
        for row in rows
    ]


def confirm(conn: Connection, ids: Sequence[int]) -> set[int]:
    """Forgets confirmed rows and the references they deleted; returns the runs whose reservations shrank. Idempotent."""
    touched: set[int] = set()
    for part in chunks(ids):
        rows = conn.execute(select(outbox.c.run, outbox.c.seq, outbox.c.attempt).where(outbox.c.id.in_(part))).all()
        conn.execute(delete(outbox).where(outbox.c.id.in_(part)))
        gone = [{"b_run": row.run, "b_seq": row.seq, "b_attempt": row.attempt} for row in rows if row.seq >= 0]
        if gone:
            conn.execute(_FORGET, gone)
        touched |= {row.run for row in rows}
    return touched


def open_rows(conn: Connection, run: int) -> tuple[int, int]:
    """(rows, bytes) of a run that are not confirmed."""
    row = conn.execute(
        select(func.count(), func.coalesce(func.sum(outbox.c.num_bytes), 0)).where(outbox.c.run == run)
    ).one()
    return int(row[0]), int(row[1])


_PUBLISHED = (
    update(outbox)
    .where(outbox.c.id == bindparam("b_id"))
    .values(published_ms=bindparam("b_now"), publications=outbox.c.publications + 1)
)
_FORGET = delete(samples).where(
    samples.c.run == bindparam("b_run"),
    samples.c.seq == bindparam("b_seq"),
    samples.c.attempt == bindparam("b_attempt"),
)
_RUN_STORE = select(runs.c.store).where(runs.c.id == bindparam("run"))
