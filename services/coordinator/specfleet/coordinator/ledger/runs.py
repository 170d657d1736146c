"""Runs: created, found, moved between states."""

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, Row, insert, select, update

from specfleet.contracts.errors import ConfigError, DataError, LedgerError
from specfleet.contracts.states import RUN_TRANSITIONS, TERMINAL_RUN_STATES, RunState
from specfleet.coordinator.ledger.tables import checkpoints, gate_reports, prompt_sets, runs, task_counts

RunRow = Row[Any]

ACTIVE = [str(state) for state in RunState if state not in TERMINAL_RUN_STATES]


def create(conn: Connection, values: Mapping[str, Any], prompt_set: Mapping[str, Any]) -> int:
    """Inserts a run (PENDING) and its prompt set; returns runs.id. ConfigError SF-RUN-EXISTS when the id is taken."""
    if conn.execute(select(runs.c.id).where(runs.c.run_id == values["run_id"])).first():
        raise ConfigError(
            "SF-RUN-EXISTS", f"a run named {values['run_id']!r} exists; choose another run id, or resume that run"
        )
    if not conn.execute(select(prompt_sets.c.digest).where(prompt_sets.c.digest == prompt_set["digest"])).first():
        conn.execute(insert(prompt_sets), [dict(prompt_set)])
    conn.execute(insert(runs), [{**values, "state": str(RunState.PENDING)}])
    return int(conn.execute(select(runs.c.id).where(runs.c.run_id == values["run_id"])).scalar_one())


def find(conn: Connection, run_id: str) -> RunRow:
    """Raises DataError SF-RUN-NOT-FOUND with the known names."""
    row = conn.execute(select(runs).where(runs.c.run_id == run_id)).first()
    if row is None:
        known = conn.execute(select(runs.c.run_id).order_by(runs.c.id.desc()).limit(10)).scalars().all()
        raise DataError("SF-RUN-NOT-FOUND", f"there is no run {run_id!r}; newest runs: {', '.join(known) or 'none'}")
    return row


def get(conn: Connection, run: int) -> RunRow:
    return conn.execute(select(runs).where(runs.c.id == run)).one()


def every(conn: Connection) -> list[RunRow]:
    return list(conn.execute(select(runs).order_by(runs.c.id)))


def active(conn: Connection) -> list[RunRow]:
    """Runs that are not terminal, oldest first."""
    return list(conn.execute(select(runs).where(runs.c.state.in_(ACTIVE)).order_by(runs.c.id)))


def set_state(conn: Connection, run: int, to: RunState, reason: str, now_ms: int) -> bool:
    """Moves a run along RUN_TRANSITIONS; a new reason alone is recorded too. Returns whether anything changed."""
    row = get(conn, run)
    if row.state == to and row.reason == reason:
        return False
    if row.state != to and to not in RUN_TRANSITIONS[RunState(row.state)]:
        raise LedgerError("SF-LEDGER-TRANSITION", f"run {row.run_id} cannot go from {row.state} to {to} ({reason})")
    conn.execute(update(runs).where(runs.c.id == run).values(state=str(to), reason=reason, updated_ms=now_ms))
    return True


def set_values(conn: Connection, run: int, **values: Any) -> None:
    conn.execute(update(runs).where(runs.c.id == run).values(**values))


def counts(conn: Connection, run: int) -> dict[str, int]:
    """Tasks per state, summed over epochs."""
    found: dict[str, int] = {}
    for state, n in conn.execute(select(task_counts.c.state, task_counts.c.n).where(task_counts.c.run == run)):
        found[state] = found.get(state, 0) + n
    return found


def committed(conn: Connection, run: int) -> list[Any]:
    query = select(checkpoints).where(checkpoints.c.run == run)
    return list(conn.execute(query.order_by(checkpoints.c.generation, checkpoints.c.step)))


def record_gate(conn: Connection, gate_id: str, run_id: str, verdict: str, report: str, now_ms: int) -> None:
    """Keeps the newest report of a gate job. Idempotent."""
    values = {"run_id": run_id, "verdict": verdict, "report": report, "recorded_ms": now_ms}
    changed = conn.execute(update(gate_reports).where(gate_reports.c.gate_id == gate_id).values(**values)).rowcount
    if not changed:
        conn.execute(insert(gate_reports), [{"gate_id": gate_id, **values}])
