"""Which step plan counts."""

from specfleet.trainer.plans import PlanBook
from specfleet.wire.records_pb2 import StepPlan


def plan(step: int, revision: int = 0, kind: "StepPlan.Kind" = StepPlan.KIND_STEP, generation: int = 1) -> StepPlan:
    return StepPlan(run_id="r", generation=generation, step=step, revision=revision, kind=kind)


def test_duplicates_and_older_revisions_change_nothing() -> None:
    book = PlanBook("r", 1, next_step=1)
    assert book.offer(plan(1))
    assert not book.offer(plan(1))
    assert book.offer(plan(1, revision=2))
    assert not book.offer(plan(1, revision=1))
    assert book.get(1).revision == 2


def test_trained_steps_and_other_generations_do_not_count() -> None:
    book = PlanBook("r", 1, next_step=1)
    book.offer(plan(1))
    book.trained(1)
    assert not book.offer(plan(1, revision=5))
    assert not book.offer(plan(2, generation=2))
    assert not book.offer(StepPlan(run_id="other", generation=1, step=2, kind=StepPlan.KIND_STEP))
    assert book.next_step == 2


def test_looks_ahead_in_order_without_gaps_and_up_to_the_end() -> None:
    book = PlanBook("r", 1, next_step=3)
    for step in (6, 4, 3):
        book.offer(plan(step))
    assert [p.step for p in book.ahead(4)] == [3, 4]
    book.offer(plan(5))
    assert [p.step for p in book.ahead(2)] == [3, 4]
    book.offer(plan(5, revision=1, kind=StepPlan.KIND_END))
    assert [p.step for p in book.ahead(9)] == [3, 4]


def test_stop_counts_whatever_step_it_names() -> None:
    book = PlanBook("r", 1, next_step=5)
    assert book.offer(plan(2, kind=StepPlan.KIND_STOP))
    assert book.stop is not None
    assert not book.offer(plan(2, kind=StepPlan.KIND_STOP))
