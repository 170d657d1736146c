"""Captured samples come in: accepted exactly when their attempt is the task's current, leased attempt."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from sqlalchemy import Connection, select, update

from specfleet.contracts.ids import sample_id
from specfleet.contracts.states import TaskState
from specfleet.coordinator.facts import RunFacts
from specfleet.coordinator.ledger import hot, outbox
from specfleet.coordinator.ledger.leases import finish_attempt
from specfleet.coordinator.ledger.moves import Task, load_by_prompt, move, stamps
from specfleet.coordinator.ledger.tables import runs, samples
from specfleet.policies.retries import Failure, judge
from specfleet.wire.records_pb2 import SampleRef


@dataclass
class Ingested:
    """What became of a batch of references."""

    accepted: int = 0
    tokens: int = 0
    duplicates: int = 0
    stale: int = 0
    rejected: list[str] = field(default_factory=list)
    workers: set[str] = field(default_factory=set)
    """Workers with an accepted sample: their breakers close."""


def accept(conn: Connection, facts: RunFacts, refs: Sequence[SampleRef], now_ms: int) -> Ingested:
    """READY/LEASED → CAPTURED for current attempts. Duplicates change nothing; objects of stale attempts are deleted."""
    result = Ingested()
    found = load_by_prompt(conn, facts.run, [(ref.attempt.task.epoch, ref.attempt.task.prompt_index) for ref in refs])
    good: dict[int, tuple[Task, SampleRef]] = {}
    for ref in refs:
        row = found.get((ref.attempt.task.epoch, ref.attempt.task.prompt_index))
        if row is not None and row.attempt == ref.attempt.attempt and (row.seq in good or _counted(conn, row)):
            result.duplicates += 1
        elif row is None or row.state != TaskState.LEASED or row.attempt != ref.attempt.attempt:
            result.stale += 1
            outbox.discard_keys(conn, facts.run, ref.store, [feature.key for feature in ref.features], now_ms)
        elif problem := _problem(facts, row, ref):
            _reject(conn, facts, row, ref, problem, now_ms)
            result.rejected.append(f"{sample_id(ref.attempt)}: {problem}")
        else:
            good[row.seq] = (row, ref)
    if good:
        _store(conn, facts, list(good.values()), now_ms, result)
    return result


def _counted(conn: Connection, row: Task) -> bool:
    """Whether this very attempt was accepted before. A LEASED task was not: acceptance ends the lease."""
    if row.state == TaskState.LEASED:
        return False
    if row.state in (TaskState.CAPTURED, TaskState.TRAINED, TaskState.SETTLED, TaskState.DROPPED_TAIL):
        return True
    where = (samples.c.run == row.run, samples.c.seq == row.seq, samples.c.attempt == row.attempt)
    return conn.execute(select(samples.c.seq).where(*where)).first() is not None


def _problem(facts: RunFacts, row: Task, ref: SampleRef) -> str:
    if ref.contract_hash != facts.contract_hash:
        return f"contract {ref.contract_hash[:12]} instead of {facts.contract_hash[:12]}"
    if ref.num_tokens != row.num_tokens:
        return f"{ref.num_tokens} tokens captured, the prompt has {row.num_tokens}"
    missing = set(facts.features) - {feature.name for feature in ref.features}
    if missing:
        return f"features {sorted(missing)} are missing"
    if ref.num_bytes > (row.reserved_bytes or 0):
        return f"{ref.num_bytes} bytes stored, {row.reserved_bytes} were reserved"
    return ""


def _reject(conn: Connection, facts: RunFacts, row: Task, ref: SampleRef, problem: str, now_ms: int) -> None:
    verdict = judge(Failure.SAMPLE, row.failures, facts.config.flow.sample_budget)
    outbox.discard(conn, facts, [row], now_ms)
    finish_attempt(conn, facts, [row], verdict.state, f"SAMPLE: {problem}", failures=verdict.failures)


def _store(
    conn: Connection, facts: RunFacts, good: list[tuple[Task, SampleRef]], now_ms: int, result: Ingested
) -> None:
    hot.insert_many(
        conn,
        "samples",
        "run, seq, attempt, store, num_tokens, num_loss_tokens, num_bytes, worker, captured_ms, ref",
        [
            (
                facts.run, row.seq, row.attempt, ref.store, ref.num_tokens, ref.num_loss_tokens, ref.num_bytes,
                ref.worker_id, now_ms, ref.SerializeToString(),
            )
            for row, ref in good
        ],
    )  # fmt: skip
    rows = [row for row, _ in good]
    # One stamp per batch: within a batch, arrival order is prompt order.
    move(conn, rows, TaskState.CAPTURED, "captured", arrived_us=stamps.take(1)[0], lease_ms=None, worker=None)
    result.accepted += len(good)
    result.tokens += sum(ref.num_tokens for _, ref in good)
    result.workers |= {ref.worker_id for _, ref in good}
    conn.execute(
        update(runs)
        .where(runs.c.id == facts.run)
        .values(captured_tokens=runs.c.captured_tokens + sum(r.num_tokens for _, r in good))
    )
