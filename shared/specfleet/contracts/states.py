"""State machines of runs and tasks (docs/design.md §3): the only transitions the ledger accepts."""

from enum import StrEnum


class TaskState(StrEnum):
    """One prompt in one epoch. READY → LEASED → CAPTURED → TRAINED → SETTLED, plus the side exits."""

    READY = "READY"
    LEASED = "LEASED"
    CAPTURED = "CAPTURED"
    TRAINED = "TRAINED"
    SETTLED = "SETTLED"
    DEAD = "DEAD"
    DROPPED_TAIL = "DROPPED_TAIL"
    SKIPPED = "SKIPPED"


class RunState(StrEnum):
    PENDING = "PENDING"
    PREPARING = "PREPARING"
    RUNNING = "RUNNING"
    PAUSED = "PAUSED"
    DRAINING = "DRAINING"
    SUCCEEDED = "SUCCEEDED"
    DEGRADED = "DEGRADED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"


TERMINAL_TASK_STATES = frozenset({TaskState.SETTLED, TaskState.DEAD, TaskState.DROPPED_TAIL, TaskState.SKIPPED})
TERMINAL_RUN_STATES = frozenset({RunState.SUCCEEDED, RunState.DEGRADED, RunState.FAILED, RunState.CANCELLED})

TASK_TRANSITIONS: dict[TaskState, frozenset[TaskState]] = {
    TaskState.READY: frozenset({TaskState.LEASED, TaskState.DEAD, TaskState.SKIPPED}),
    # back to READY: the lease expired, or the worker failed or returned it
    TaskState.LEASED: frozenset({TaskState.CAPTURED, TaskState.READY, TaskState.DEAD}),
    # back to READY: the features were lost
    TaskState.CAPTURED: frozenset({TaskState.TRAINED, TaskState.READY, TaskState.DEAD, TaskState.DROPPED_TAIL}),
    # back to READY or CAPTURED: the trainer was restored to an earlier checkpoint
    TaskState.TRAINED: frozenset({TaskState.SETTLED, TaskState.READY, TaskState.CAPTURED}),
    TaskState.SETTLED: frozenset(),
    TaskState.DEAD: frozenset(),
    TaskState.DROPPED_TAIL: frozenset(),
    TaskState.SKIPPED: frozenset(),
}

RUN_TRANSITIONS: dict[RunState, frozenset[RunState]] = {
    RunState.PENDING: frozenset({RunState.PREPARING, RunState.CANCELLED, RunState.FAILED}),
    RunState.PREPARING: frozenset({RunState.RUNNING, RunState.PAUSED, RunState.CANCELLED, RunState.FAILED}),
    RunState.RUNNING: frozenset({RunState.PAUSED, RunState.DRAINING, RunState.CANCELLED, RunState.FAILED}),
    RunState.PAUSED: frozenset(
        {RunState.RUNNING, RunState.PREPARING, RunState.DRAINING, RunState.CANCELLED, RunState.FAILED}
    ),
    # back to RUNNING: the final checkpoint was lost and the trainer was restored to an earlier one
    RunState.DRAINING: frozenset(
        {RunState.SUCCEEDED, RunState.DEGRADED, RunState.FAILED, RunState.CANCELLED, RunState.RUNNING, RunState.PAUSED}
    ),
    RunState.SUCCEEDED: frozenset(),
    RunState.DEGRADED: frozenset(),
    RunState.FAILED: frozenset(),
    RunState.CANCELLED: frozenset(),
}
