"""The only place that changes a task's state: every change is checked against contracts/states.py, counted and recorded."""

import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import Connection, Row, bindparam, insert, select, update

from specfleet.contracts.errors import LedgerError
from specfleet.contracts.states import TASK_TRANSITIONS, TaskState
from specfleet.coordinator.ledger.tables import task_counts, tasks, transitions

# SQLite's default limit is 32766 variables per statement; a smaller list also keeps plans small.
CHUNK = 1_000

Task = Row[Any]
"""A row of `tasks`."""


class _Stamps:
    """Microseconds since the epoch, unique and rising within this process."""

    def __init__(self) -> None:
        self._last = 0
        self._lock = threading.Lock()

    def take(self, count: int) -> range:
        with self._lock:
            first = max(self._last + 1, time.time_ns() // 1_000)
            self._last = first + count - 1
            return range(first, first + count)


stamps = _Stamps()


def chunks(values: Sequence[Any], size: int = CHUNK) -> Iterable[Sequence[Any]]:
    for start in range(0, len(values), size):
        yield values[start : start + size]


def load_by_seq(conn: Connection, run: int, seqs: Sequence[int]) -> list[Task]:
    """Tasks in ascending seq; unknown ones are left out."""
    found: list[Task] = []
    for part in chunks(sorted(seqs)):
        query = select(tasks).where(tasks.c.run == run, tasks.c.seq.in_(part)).order_by(tasks.c.seq)
        found.extend(conn.execute(query))
    return found


def load_by_prompt(conn: Connection, run: int, prompts: Iterable[tuple[int, int]]) -> dict[tuple[int, int], Task]:
    """(epoch, prompt_index) → task; unknown ones are left out."""
    by_epoch: dict[int, list[int]] = {}
    for epoch, index in prompts:
        by_epoch.setdefault(epoch, []).append(index)
    found: dict[tuple[int, int], Task] = {}
    for epoch, indices in by_epoch.items():
        for part in chunks(indices):
            query = select(tasks).where(tasks.c.run == run, tasks.c.epoch == epoch, tasks.c.prompt_index.in_(part))
            found.update({(row.epoch, row.prompt_index): row for row in conn.execute(query)})
    return found


def move(conn: Connection, rows: Sequence[Task], to: TaskState, detail: str, **values: Any) -> None:
    """Moves tasks of one run to a state, setting further columns to the same values on each.

    Raises LedgerError SF-LEDGER-TRANSITION when the state machine has no such edge, SF-LEDGER-FENCE when a row changed since
    it was read (which cannot happen with one writer, and is why it is checked).
    """
    if not rows:
        return
    run = rows[0].run
    for row in rows:
        if to not in TASK_TRANSITIONS[TaskState(row.state)]:
            raise LedgerError(
                "SF-LEDGER-TRANSITION",
                f"task e{row.epoch:04d}-p{row.prompt_index:09d} cannot go from {row.state} to {to} ({detail})",
            )
    for state in sorted({row.state for row in rows}):
        for part in chunks([row.seq for row in rows if row.state == state]):
            where = (tasks.c.run == run, tasks.c.seq.in_(part), tasks.c.state == state)
            changed = conn.execute(update(tasks).where(*where).values(state=str(to), **values)).rowcount
            if changed != len(part):
                raise LedgerError(
                    "SF-LEDGER-FENCE",
                    f"{len(part)} tasks should go from {state} to {to}, {changed} were there ({detail})",
                )
    deltas: Counter[tuple[int, str]] = Counter()
    for row in rows:
        deltas[row.epoch, row.state] -= 1
        deltas[row.epoch, str(to)] += 1
    count(conn, run, deltas)
    record(conn, rows, str(to), detail)


def count(conn: Connection, run: int, deltas: Counter[tuple[int, str]]) -> None:
    """Adds to task_counts; the rows of an epoch exist since its first task was ingested."""
    changes = [{"b_run": run, "b_epoch": epoch, "b_state": state, "d": d} for (epoch, state), d in deltas.items() if d]
    if changes:
        conn.execute(_COUNT, changes)


_COUNT = (
    update(task_counts)
    .where(
        task_counts.c.run == bindparam("b_run"),
        task_counts.c.epoch == bindparam("b_epoch"),
        task_counts.c.state == bindparam("b_state"),
    )
    .values(n=task_counts.c.n + bindparam("d"))
)


def record(conn: Connection, rows: Sequence[Task], state: str, detail: str, *, attempt_delta: int = 0) -> None:
    """One line of history per task."""
    if rows:
        conn.execute(
            insert(transitions),
            [
                {
                    "run": row.run, "seq": row.seq, "at_us": at, "state": state, "attempt": row.attempt + attempt_delta, "detail": detail
                }
                for row, at in zip(rows, stamps.take(len(rows)), strict=True)
            ],
        )  # fmt: skip
