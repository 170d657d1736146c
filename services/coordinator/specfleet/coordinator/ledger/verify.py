"""Proof of the invariants from the rows themselves (docs/design.md §3), and the history of one sample."""

from dataclasses import dataclass, field
from datetime import UTC, datetime

from sqlalchemy import Connection, exists, func, select

from specfleet.contracts.errors import DataError
from specfleet.contracts.states import TERMINAL_RUN_STATES, TaskState
from specfleet.coordinator.ledger import runs as run_rows
from specfleet.coordinator.ledger.moves import load_by_prompt
from specfleet.coordinator.ledger.outbox import open_rows
from specfleet.coordinator.ledger.tables import task_counts, tasks, transitions, window_members, windows
from specfleet.coordinator.ledger.tasks import held


@dataclass(frozen=True)
class EpochRow:
    epoch: int
    ingested: int
    tasks: dict[str, int]
    conserved: bool


@dataclass
class Verdict:
    rows: list[EpochRow] = field(default_factory=list)
    trained_twice: int = 0
    trained_never: int = 0
    violations: list[str] = field(default_factory=list)
    reserved_bytes: int = 0
    outbox_open: int = 0

    @property
    def conserved(self) -> bool:
        return all(row.conserved for row in self.rows)


def verify(conn: Connection, run_id: str) -> Verdict:
    """Counts every row of the run; linear in its size."""
    run = run_rows.find(conn, run_id)
    verdict = Verdict(reserved_bytes=held(conn, run.id).num_bytes, outbox_open=open_rows(conn, run.id)[0])
    _conservation(conn, run, verdict)
    _exactly_once(conn, run, verdict)
    _lineage(conn, run, verdict)
    return verdict


def _conservation(conn: Connection, run: run_rows.RunRow, verdict: Verdict) -> None:
    counted: dict[int, dict[str, int]] = {}
    for epoch, state, n in conn.execute(
        select(tasks.c.epoch, tasks.c.state, func.count())
        .where(tasks.c.run == run.id)
        .group_by(tasks.c.epoch, tasks.c.state)
    ):
        counted.setdefault(epoch, {})[state] = n
    kept: dict[int, dict[str, int]] = {}
    for row in conn.execute(select(task_counts).where(task_counts.c.run == run.id, task_counts.c.n != 0)):
        kept.setdefault(row.epoch, {})[row.state] = row.n
    for epoch in range(-(-run.ingested // run.num_prompts)):
        # What the cursor says was ingested; prompts of an epoch are ingested once each, in order.
        ingested = min(run.num_prompts, run.ingested - epoch * run.num_prompts)
        states = counted.get(epoch, {})
        conserved = sum(states.values()) == ingested and set(states) <= set(TaskState)
        verdict.rows.append(EpochRow(epoch, ingested, states, conserved))
        if not conserved:
            verdict.violations.append(
                f"epoch {epoch}: {ingested} tasks were ingested, {sum(states.values())} are accounted for: {states}"
            )
        if states != kept.get(epoch, {}):
            verdict.violations.append(
                f"epoch {epoch}: the running counts {kept.get(epoch, {})} differ from the tasks {states}"
            )
    if run.state in TERMINAL_RUN_STATES and run.state not in ("CANCELLED", "FAILED"):
        unfinished = sum(n for row in verdict.rows for state, n in row.tasks.items() if state in _UNFINISHED)
        if unfinished:
            verdict.violations.append(f"the run is {run.state} with {unfinished} unfinished tasks")


_UNFINISHED = (TaskState.READY, TaskState.LEASED, TaskState.CAPTURED, TaskState.TRAINED)


def _exactly_once(conn: Connection, run: run_rows.RunRow, verdict: Verdict) -> None:
    m, w = window_members, windows
    same_window = (w.c.run == m.c.run) & (w.c.generation == m.c.generation) & (w.c.step == m.c.step)
    surviving = (m.c.run == run.id, w.c.state == "TRAINED")
    twice = (
        select(m.c.epoch, m.c.prompt_index).join(w, same_window).where(*surviving)
        .group_by(m.c.epoch, m.c.prompt_index).having(func.count() > 1).subquery()
    )  # fmt: skip
    verdict.trained_twice = int(conn.execute(select(func.count()).select_from(twice)).scalar_one())
    if verdict.trained_twice:
        verdict.violations.append(f"{verdict.trained_twice} prompts are in more than one step of the surviving lineage")
    trained = tasks.c.state.in_([str(TaskState.TRAINED), str(TaskState.SETTLED)])
    in_step = exists().where(
        m.c.run == tasks.c.run, m.c.seq == tasks.c.seq, m.c.step == tasks.c.step, same_window, w.c.state == "TRAINED"
    )
    never = select(func.count()).where(tasks.c.run == run.id, trained, ~in_step)
    verdict.trained_never = int(conn.execute(never).scalar_one())
    if verdict.trained_never:
        verdict.violations.append(
            f"{verdict.trained_never} tasks count as trained without a step in the surviving lineage"
        )
    astray = (
        select(func.count()).select_from(m.join(w, same_window).join(tasks, (tasks.c.run == m.c.run) & (tasks.c.seq == m.c.seq)))
        .where(*surviving, ~trained)
    )  # fmt: skip
    if count := conn.execute(astray).scalar_one():
        verdict.violations.append(f"{count} tasks are in a trained step and do not count as trained")


def _lineage(conn: Connection, run: run_rows.RunRow, verdict: Verdict) -> None:
    query = select(windows.c.step).where(windows.c.run == run.id, windows.c.state == "TRAINED").order_by(windows.c.step)
    steps = list(conn.execute(query).scalars())
    # Acks of neighbouring steps may arrive in any order; a checkpoint closes every gap below it.
    settled = [step for step in steps if step <= run.checkpoint_step]
    if settled != list(range(1, run.checkpoint_step + 1)) or len(set(steps)) != len(steps):
        verdict.violations.append(
            f"the surviving lineage has {len(settled)} steps up to its checkpoint of step {run.checkpoint_step}, {len(steps)} in all"
        )


def explain(conn: Connection, run_id: str, epoch: int, prompt_index: int) -> tuple[str, int, str, list[str]]:
    """(state, attempt, reason, history lines) of one task. DataError SF-SAMPLE-NOT-FOUND when it was never ingested."""
    run = run_rows.find(conn, run_id)
    task = load_by_prompt(conn, run.id, [(epoch, prompt_index)]).get((epoch, prompt_index))
    if task is None:
        raise DataError(
            "SF-SAMPLE-NOT-FOUND",
            f"run {run_id} has no task of epoch {epoch}, prompt {prompt_index}: it has {run.num_prompts} prompts, "
            f"and {run.ingested} tasks were begun",
        )
    query = (
        select(transitions)
        .where(transitions.c.run == run.id, transitions.c.seq == task.seq)
        .order_by(transitions.c.at_us)
    )
    history = []
    for row in conn.execute(query):
        at = datetime.fromtimestamp(row.at_us / 1_000_000, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        history.append(f"{at} {row.state} attempt {row.attempt}: {row.detail}")
    return task.state, task.attempt, task.reason, history
