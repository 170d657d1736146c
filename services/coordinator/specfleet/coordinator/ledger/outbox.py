"""Deletions that are due. Written in the transaction that makes an object useless; gone when a worker confirms them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, bindparam, func, select

from specfleet.contracts.ids import feature_key, task_key
from specfleet.coordinator.facts import RunFacts
from specfleet.coordinator.ledger import hot, offline
from specfleet.coordinator.ledger.moves import Task
from specfleet.coordinator.ledger.tables import outbox, runs
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
    # A key ends with its feature's name.
    prefix = feature_key(store, named, "")
    return [prefix + feature for feature in facts.features]


def discard(conn: Connection, facts: RunFacts, rows: Sequence[Task], now_ms: int) -> None:
    """Queues the deletion of what the current attempts of these tasks wrote or may have written. Their bytes move along:
    the caller sets tasks.reserved_bytes to NULL in the same transaction. What lies in a feature set stays there."""
    if facts.offline:
        offline.forget(conn, facts, rows)
        return
    stored = _stored(conn, facts.run, rows, keys=facts.config.flow.reuse_bytes > 0)
    fallback = conn.execute(_RUN_STORE, {"run": facts.run}).scalar_one()
    entries = []
    for row in rows:
        store, keys = stored.get((row.seq, row.attempt), (fallback, []))
        if not store:
            continue
        keys = keys or attempt_keys(facts, store, row.epoch, row.prompt_index, row.attempt)
        entries.append((row.run, row.seq, row.attempt, store, "\n".join(keys), row.reserved_bytes or 0, now_ms))
    hot.insert_many(conn, "outbox", _ENTRY, entries)


def discard_keys(conn: Connection, run: int, store: str, keys: Iterable[str], now_ms: int) -> None:
    """Queues the deletion of objects nobody counts: a stale attempt, or a run that is gone (run 0)."""
    hot.insert_many(conn, "outbox", _ENTRY, [(run, -1, 0, store, "\n".join(keys), 0, now_ms)])


def _stored(
    conn: Connection, run: int, rows: Sequence[Task], *, keys: bool
) -> dict[tuple[int, int], tuple[str, list[str]]]:
    """(seq, attempt) → the store of its sample and, when asked for, its keys: an attempt that took over the features of an
    earlier epoch wrote none under its own name."""
    found: dict[tuple[int, int], tuple[str, list[str]]] = {}
    if rows:
        column = ", ref" if keys else ""
        sql = f"SELECT seq, attempt, store{column} FROM samples WHERE run = ? AND seq IN ?list"
        for row in hot.execute(conn, sql, run, hot.Ids(row.seq for row in rows)):
            names = [feature.key for feature in SampleRef.FromString(row.ref).features] if keys else []
            found[row.seq, row.attempt] = (row.store, names)
    return found


def due(conn: Connection, now_ms: int, republish_ms: int) -> list[Due]:
    """Marks rows never published, or published and unconfirmed for republish_ms, as published now; returns them."""
    sql = "SELECT id, store, keys, num_bytes, publications FROM outbox WHERE published_ms <= ? ORDER BY id LIMIT ?"
    rows = hot.execute(conn, sql, max(0, now_ms - republish_ms), PUBLISH_BATCH).all()
    if rows:
        sql = "UPDATE outbox SET published_ms = ?, publications = publications + 1 WHERE id IN ?list"
        hot.execute(conn, sql, now_ms, hot.Ids(row.id for row in rows))
    return [
        Due(
            Release(outbox_id=row.id, store=row.store, keys=row.keys.split("\n"), num_bytes=row.num_bytes),
            f"outbox/{row.id}/{row.publications + 1}",
        )
        for row in rows
    ]


def confirm(conn: Connection, ids: Sequence[int]) -> set[int]:
    """Forgets confirmed rows and the references they deleted; returns the runs whose reservations shrank. Idempotent."""
    wanted = hot.Ids(ids)
    rows = hot.execute(conn, "SELECT run, seq, attempt FROM outbox WHERE id IN ?list", wanted).all()
    hot.execute(conn, "DELETE FROM outbox WHERE id IN ?list", wanted)
    gone = [(row.run, row.seq, row.attempt) for row in rows if row.seq >= 0]
    hot.execute_many(conn, "DELETE FROM samples WHERE run = ? AND seq = ? AND attempt = ?", gone)
    return {row.run for row in rows}


def open_rows(conn: Connection, run: int) -> tuple[int, int]:
    """(rows, bytes) of a run that are not confirmed."""
    row = conn.execute(
        select(func.count(), func.coalesce(func.sum(outbox.c.num_bytes), 0)).where(outbox.c.run == run)
    ).one()
    return int(row[0]), int(row[1])


_ENTRY = "run, seq, attempt, store, keys, num_bytes, created_ms"
_RUN_STORE = select(runs.c.store).where(runs.c.id == bindparam("run"))
