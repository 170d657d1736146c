"""The only place that changes a task's state: every change is checked against contracts/states.py, counted and recorded."""

import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import Connection, Row

from specfleet.contracts.errors import LedgerError
from specfleet.contracts.states import TASK_TRANSITIONS, TaskState
from specfleet.coordinator.ledger import hot
from specfleet.coordinator.ledger.tables import tasks

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


_COLUMNS = ", ".join(column.name for column in tasks.c)
_BY_SEQ = f"SELECT {_COLUMNS} FROM tasks WHERE run = ? AND seq IN ?list ORDER BY seq"
_BY_PROMPT = f"SELECT {_COLUMNS} FROM tasks WHERE run = ? AND epoch = ? AND prompt_index IN ?list"


def load_by_seq(conn: Connection, run: int, seqs: Sequence[int]) -> list[Task]:
    """Tasks in ascending seq; unknown ones are left out."""
    return list(hot.execute(conn, _BY_SEQ, run, hot.Ids(seqs))) if seqs else []


def load_by_prompt(conn: Connection, run: int, prompts: Iterable[tuple[int, int]]) -> dict[tuple[int, int], Task]:
    """(epoch, prompt_index) → task; unknown ones are left out."""
    by_epoch: dict[int, hot.Ids] = {}
    for epoch, index in prompts:
        by_epoch.setdefault(epoch, hot.Ids()).append(index)
    return {
        (row.epoch, row.prompt_index): row
        for epoch, indices in by_epoch.items()
        for row in hot.execute(conn, _BY_PROMPT, run, epoch, indices)
    }


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
    assigned = "".join(f", {column} = ?" for column in values)
    sql = f"UPDATE tasks SET state = ?{assigned} WHERE run = ? AND seq IN ?list AND state = ?"
    for state in sorted({row.state for row in rows}):
        seqs = hot.Ids(row.seq for row in rows if row.state == state)
        changed = hot.execute(conn, sql, str(to), *values.values(), run, seqs, state).rowcount
        if changed != len(seqs):
            raise LedgerError(
                "SF-LEDGER-FENCE", f"{len(seqs)} tasks should go from {state} to {to}, {changed} were there ({detail})"
            )
    deltas: Counter[tuple[int, str]] = Counter()
    for row in rows:
        deltas[row.epoch, row.state] -= 1
        deltas[row.epoch, str(to)] += 1
    count(conn, run, deltas)
    record(conn, rows, str(to), detail)


def count(conn: Connection, run: int, deltas: Counter[tuple[int, str]]) -> None:
    """Adds to task_counts; the rows of an epoch exist since its first task was ingested."""
    sql = "UPDATE task_counts SET n = n + ? WHERE run = ? AND epoch = ? AND state = ?"
    hot.execute_many(conn, sql, [(delta, run, epoch, state) for (epoch, state), delta in deltas.items() if delta])


def record(conn: Connection, rows: Sequence[Task], state: str, detail: str, *, attempt_delta: int = 0) -> None:
    """One line of history per task."""
    hot.insert_many(
        conn,
        "transitions",
        "run, seq, at_us, state, attempt, detail",
        [
            (row.run, row.seq, at, state, row.attempt + attempt_delta, detail)
            for row, at in zip(rows, stamps.take(len(rows)), strict=True)
        ],
    )
