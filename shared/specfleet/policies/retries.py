"""Whom a failure costs: the worker (INFRA), the prompt (SAMPLE) or nobody (RETURNED)."""

from dataclasses import dataclass
from enum import StrEnum

from specfleet.contracts.states import TaskState


class Failure(StrEnum):
    INFRA = "INFRA"
    SAMPLE = "SAMPLE"
    RETURNED = "RETURNED"


@dataclass(frozen=True)
class Verdict:
    state: TaskState
    """Where the task goes: READY or DEAD."""
    failures: int
    """Failures charged to the prompt so far, this one included."""
    blames_worker: bool


def judge(failure: Failure, failures: int, budget: int) -> Verdict:
    """`failures`: charged before this one. `budget`: failures at which the prompt is DEAD (flow.sample_budget)."""
    if failure is Failure.SAMPLE:
        failures += 1
        return Verdict(TaskState.DEAD if failures >= budget else TaskState.READY, failures, blames_worker=False)
    return Verdict(TaskState.READY, failures, blames_worker=failure is Failure.INFRA)


def outcome(dead: int, ingested: int, max_dead_fraction: float) -> str:
    """SUCCEEDED, DEGRADED or FAILED, decided only after everything else was trained."""
    if dead == 0:
        return "SUCCEEDED"
    return "DEGRADED" if dead <= max_dead_fraction * ingested else "FAILED"
