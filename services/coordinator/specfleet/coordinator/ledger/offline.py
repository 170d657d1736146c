"""Tasks of a run that trains from a feature set: captured by being dispatched, without a message, a worker or a byte.

Their samples name the set. Nothing of it is ever deleted: a sample row goes when its task no longer needs it.
"""

from collections.abc import Sequence

from sqlalchemy import Connection

from specfleet.contracts.ids import task_key
from specfleet.contracts.states import TaskState
from specfleet.coordinator.facts import RunFacts
from specfleet.coordinator.ledger import hot
from specfleet.coordinator.ledger.moves import Task, load_by_seq, move, stamps
from specfleet.features.feature_set import FeatureSet
from specfleet.features.source import features_url
from specfleet.wire.records_pb2 import SampleRef, TaskAttempt


def take(conn: Connection, facts: RunFacts, features: FeatureSet, rows: Sequence[Task], now_ms: int) -> set[int]:
    """READY → LEASED → CAPTURED for tasks that were just dispatched; DEAD for prompts the set has none of. Returns their seqs."""
    dead = features.manifest.dead
    for row in rows:
        if reason := dead.get(row.prompt_index):
            move(conn, [row], TaskState.DEAD, reason, reason=reason, dispatched_ms=None, reserved_bytes=None)
    found = [row for row in rows if row.prompt_index not in dead]
    _insert(conn, facts, features, found, now_ms)
    move(conn, found, TaskState.LEASED, "recorded in a feature set", dispatched_ms=None)
    current = load_by_seq(conn, facts.run, [row.seq for row in found])
    move(conn, current, TaskState.CAPTURED, "recorded in a feature set", arrived_us=stamps.take(1)[0])
    return {row.seq for row in rows}


def forget(conn: Connection, facts: RunFacts, rows: Sequence[Task]) -> None:
    """The current attempts of these tasks no longer need their samples."""
    gone = [(facts.run, row.seq, row.attempt) for row in rows]
    hot.execute_many(conn, "DELETE FROM samples WHERE run = ? AND seq = ? AND attempt = ?", gone)


def _insert(conn: Connection, facts: RunFacts, features: FeatureSet, rows: Sequence[Task], now_ms: int) -> None:
    store = features_url(features)
    values = []
    for row in rows:
        task = task_key(facts.run_id, row.epoch, row.prompt_index)
        ref = SampleRef(
            attempt=TaskAttempt(task=task, attempt=row.attempt),
            contract_hash=facts.contract_hash,
            store=store,
            num_tokens=row.num_tokens,
            num_loss_tokens=int(features.num_loss_tokens[row.prompt_index]),
        )
        values.append(
            (
                facts.run,
                row.seq,
                row.attempt,
                store,
                row.num_tokens,
                ref.num_loss_tokens,
                now_ms,
                ref.SerializeToString(),
            )
        )
    columns = "run, seq, attempt, store, num_tokens, num_loss_tokens, captured_ms, ref"
    hot.insert_many(conn, "samples", columns, values)
