"""Lives of a trainer process group: opened at a checkpoint, acked step by step, settled by the next checkpoint."""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import Connection, delete, func, insert, select, update

from specfleet.contracts.errors import ContractError, LedgerError
from specfleet.contracts.states import TaskState
from specfleet.coordinator.facts import RunFacts
from specfleet.coordinator.ledger import outbox
from specfleet.coordinator.ledger import windows as window_rows
from specfleet.coordinator.ledger.moves import chunks, move
from specfleet.coordinator.ledger.tables import acks, checkpoints, generations, launches, runs, tasks, windows
from specfleet.coordinator.ledger.tasks import CLEARED


@dataclass(frozen=True)
class Opened:
    generation: int
    checkpoint_uri: str
    checkpoint_digest: str
    restored_step: int


def check_identity(conn: Connection, facts: RunFacts, identity: Mapping[str, str]) -> None:
    """Records the draft's identity at the first join; later ones must agree.

    Raises ContractError SF-RUN-IDENTITY showing both values of every fact that differs.
    """
    recorded = conn.execute(select(runs.c.identity).where(runs.c.id == facts.run)).scalar_one()
    if not recorded:
        conn.execute(
            update(runs).where(runs.c.id == facts.run).values(identity=json.dumps(dict(identity), sort_keys=True))
        )
        return
    known: dict[str, str] = json.loads(recorded)
    different = [
        f"{name}: recorded {known.get(name, 'nothing')!r}, now {identity.get(name, 'nothing')!r}"
        for name in sorted(known.keys() | identity.keys())
        if known.get(name) != identity.get(name)
    ]
    if different:
        raise ContractError(
            "SF-RUN-IDENTITY",
            f"the draft of run {facts.run_id} is not the one its checkpoints hold: {'; '.join(different)}. "
            "Resume with the recorded values, or submit a new run",
        )


def open_generation(conn: Connection, facts: RunFacts, launch_id: str, now_ms: int) -> Opened:
    """All ranks of a launch have joined: the old generation is fenced off and training restarts after the newest checkpoint.

    Planned windows are abandoned and their samples kept. Windows trained after the checkpoint are abandoned and their tasks go
    back to READY, or to CAPTURED where features are retained. Idempotent per launch.
    """
    run = conn.execute(select(runs).where(runs.c.id == facts.run)).one()
    launch = conn.execute(select(launches).where(launches.c.launch_id == launch_id)).one()
    known = conn.execute(
        select(generations).where(generations.c.run == facts.run, generations.c.launch_id == launch_id)
    ).first()
    if known is not None:
        if known.generation != run.generation or launch.state == "ENDED":
            raise LedgerError("SF-RUN-STALE-LAUNCH", f"launch {launch_id} of run {facts.run_id} is over; leave")
        return Opened(known.generation, known.checkpoint_uri, known.checkpoint_digest, known.restored_step)
    newest = conn.execute(
        select(checkpoints)
        .where(checkpoints.c.run == facts.run)
        .order_by(checkpoints.c.step.desc(), checkpoints.c.generation.desc())
        .limit(1)
    ).first()
    step = int(newest.step) if newest else 0
    _roll_back(conn, facts, step)
    generation = run.generation + 1
    close_generation(conn, facts.run, run.generation, "a new generation opened", now_ms)
    opened = Opened(generation, newest.uri if newest else "", newest.digest if newest else "", step)
    conn.execute(
        insert(generations),
        [
            {
                "run": facts.run, "generation": generation, "launch_id": launch_id, "world": launch.world,
                "restored_step": step, "checkpoint_uri": opened.checkpoint_uri,
                "checkpoint_digest": opened.checkpoint_digest, "opened_ms": now_ms,
            }
        ],
    )  # fmt: skip
    conn.execute(
        update(launches).where(launches.c.launch_id == launch_id).values(state="JOINED", generation=generation)
    )
    conn.execute(
        update(runs)
        .where(runs.c.id == facts.run)
        .values(generation=generation, attached_world=launch.world, trained_step=step, final=0, updated_ms=now_ms)
    )
    return opened


def close_generation(conn: Connection, run: int, generation: int, reason: str, now_ms: int) -> None:
    where = (generations.c.run == run, generations.c.generation == generation, generations.c.closed_ms == 0)
    conn.execute(update(generations).where(*where).values(closed_ms=now_ms, close_reason=reason))


def _roll_back(conn: Connection, facts: RunFacts, step: int) -> None:
    where_run = windows.c.run == facts.run
    lost = select(func.coalesce(func.sum(windows.c.num_tokens), 0)).where(
        where_run, windows.c.state == "TRAINED", windows.c.step > step
    )
    tokens = int(conn.execute(lost).scalar_one())
    conn.execute(update(runs).where(runs.c.id == facts.run).values(trained_tokens=runs.c.trained_tokens - tokens))
    conn.execute(update(windows).where(where_run, windows.c.state == "PLANNED").values(state="ABANDONED", waiting=0))
    conn.execute(
        update(windows).where(where_run, windows.c.state == "TRAINED", windows.c.step > step).values(state="ABANDONED")
    )
    for state in (TaskState.READY, TaskState.LEASED, TaskState.CAPTURED):
        planned = (tasks.c.run == facts.run, tasks.c.state == str(state), tasks.c.step.is_not(None))
        conn.execute(update(tasks).where(*planned).values(step=None))
    trained = conn.execute(
        select(tasks).where(tasks.c.run == facts.run, tasks.c.state == str(TaskState.TRAINED), tasks.c.step > step)
    ).all()
    if facts.retains:
        move(conn, trained, TaskState.CAPTURED, f"trainer restored to step {step}; features were kept", step=None)
    else:
        move(conn, trained, TaskState.READY, f"trainer restored to step {step}", **{**CLEARED, "step": None})


@dataclass(frozen=True)
class Ack:
    generation: int
    step: int
    rank: int
    digest: str
    revision: int
    num_tokens: int
    num_loss_tokens: int
    step_s: float
    wait_s: float
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class Acked:
    accepted: bool
    current_generation: int
    fresh: bool = False
    trained_tokens: int = 0
    """Tokens of the window, when this was the last rank's ack."""


def ack(conn: Connection, facts: RunFacts, given: Ack, now_ms: int) -> Acked:
    """Records one rank's ack; the last rank's marks the window TRAINED in the same transaction. Idempotent."""
    current = int(conn.execute(select(runs.c.generation).where(runs.c.id == facts.run)).scalar_one())
    if given.generation != current:
        return Acked(False, current)
    key = (windows.c.run == facts.run, windows.c.generation == current, windows.c.step == given.step)
    window = conn.execute(select(windows).where(*key)).first()
    if window is None or window.state == "ABANDONED" or given.rank >= window.world:
        raise LedgerError(
            "SF-RUN-UNKNOWN-STEP",
            f"rank {given.rank} acked step {given.step} of generation {current} of run {facts.run_id}, which was never planned",
        )
    of_step = (acks.c.run == facts.run, acks.c.generation == current, acks.c.step == given.step)
    if (
        window.state == "TRAINED"
        or conn.execute(select(acks.c.rank).where(*of_step, acks.c.rank == given.rank)).first()
    ):
        return Acked(True, current)
    conn.execute(
        insert(acks),
        [
            {
                "run": facts.run, "generation": current, "step": given.step, "rank": given.rank, "digest": given.digest,
                "revision": given.revision, "num_tokens": given.num_tokens, "num_loss_tokens": given.num_loss_tokens,
                "step_s": given.step_s, "wait_s": given.wait_s, "at_ms": now_ms,
            }
        ],
    )  # fmt: skip
    if given.metrics:
        conn.execute(update(runs).where(runs.c.id == facts.run).values(metrics=json.dumps(dict(given.metrics))))
    if conn.execute(select(func.count()).where(*of_step)).scalar_one() < window.world:
        return Acked(True, current, fresh=True)
    return Acked(True, current, fresh=True, trained_tokens=window_rows.train(conn, facts, window, now_ms))


def commit_checkpoint(
    conn: Connection, facts: RunFacts, generation: int, step: int, uri: str, digest: str, *, final: bool, now_ms: int
) -> bool:
    """Settles every task trained at or before `step`. False: the generation is not current. Idempotent.

    A checkpoint of step s holds the gradient of every rank up to s, so acks that are still under way are implied by it.
    """
    run = conn.execute(select(runs).where(runs.c.id == facts.run)).one()
    key = (checkpoints.c.run == facts.run, checkpoints.c.generation == generation, checkpoints.c.step == step)
    known = conn.execute(select(checkpoints).where(*key)).first()
    if known is not None and known.digest != digest:
        raise LedgerError(
            "SF-RUN-CHECKPOINT-DIFFERS",
            f"checkpoint of step {step} in generation {generation} of run {facts.run_id} is recorded with digest {known.digest}, "
            f"now it comes with {digest}",
        )
    if generation != run.generation:
        return known is not None
    for window in window_rows.planned(conn, facts.run, generation):
        if window.step <= step:
            window_rows.train(conn, facts, window, now_ms)
    if known is None:
        _check_lineage(conn, facts, step)
        conn.execute(
            insert(checkpoints),
            [
                {
                    "run": facts.run, "generation": generation, "step": step, "uri": uri, "digest": digest,
                    "final": int(final), "committed_ms": now_ms,
                }
            ],
        )  # fmt: skip
    elif final:
        conn.execute(update(checkpoints).where(*key).values(final=1))
    _settle(conn, facts, step, now_ms)
    conn.execute(delete(acks).where(acks.c.run == facts.run, acks.c.step <= step))
    values = {
        "checkpoint_step": max(step, run.checkpoint_step),
        "updated_ms": now_ms,
        **({"final": 1} if final else {}),
    }
    conn.execute(update(runs).where(runs.c.id == facts.run).values(**values))
    return True


def _check_lineage(conn: Connection, facts: RunFacts, step: int) -> None:
    trained = int(conn.execute(select(runs.c.trained_step).where(runs.c.id == facts.run)).scalar_one())
    if step > trained:
        raise LedgerError(
            "SF-RUN-UNKNOWN-STEP",
            f"a checkpoint of step {step} of run {facts.run_id} was committed, but only steps up to {trained} were planned and trained",
        )


def _settle(conn: Connection, facts: RunFacts, step: int, now_ms: int) -> None:
    query = select(tasks).where(tasks.c.run == facts.run, tasks.c.state == str(TaskState.TRAINED), tasks.c.step <= step)
    rows = conn.execute(query).all()
    for part in chunks(rows):
        if facts.retains:
            outbox.discard(conn, facts, part, now_ms)
        move(conn, part, TaskState.SETTLED, f"settled by the checkpoint of step {step}", reserved_bytes=None)
