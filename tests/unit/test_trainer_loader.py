"""The loader against the in-memory store: order, prefetch, lost objects, infrastructure failures, replaced plans."""

import threading
from collections.abc import Iterator, Sequence
from queue import Queue

import pytest
import torch
from fixtures.tiny_strategy import HIDDEN, TinyStrategy

from specfleet.contracts.errors import ContractError, StoreError
from specfleet.store.memory import MemoryStore
from specfleet.trainer.loader import Loader, Window
from specfleet.trainer.plans import PlanBook
from specfleet.wire.records_pb2 import MicroBatch, SampleRef, StepPlan, TaskAttempt, TaskKey
from specfleet.wire.trainer_pb2 import ReportLostRequest


class FlakyStore(MemoryStore):
    """Fails a number of reads as a server that is down would, and lets a test wait for the reads."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.failures = 0
        self.read: list[int] = []
        self.seen = threading.Semaphore(0)

    def get(self, ref: SampleRef, names: Sequence[str] | None = None) -> dict[str, torch.Tensor]:
        if self.failures:
            self.failures -= 1
            raise StoreError("SF-STORE-UNREACHABLE", "the store does not answer")
        self.read.append(ref.attempt.task.prompt_index)
        self.seen.release()
        return super().get(ref, names)


def never() -> bool:
    return False


class Bench:
    def __init__(self, name: str, prefetch: int = 2) -> None:
        self.store = FlakyStore(name)
        self.lost: Queue[ReportLostRequest] = Queue()
        self.book = PlanBook("r", 1, next_step=1)
        self.loader = Loader(
            self.store,
            TinyStrategy().collate,
            self.book,
            contract_hash="c",
            prefetch=prefetch,
            report_lost=self.lost.put,
        )

    def sample(self, index: int, tokens: int = 3, attempt: int = 1, contract: str = "c") -> SampleRef:
        key = TaskAttempt(task=TaskKey(run_id="r", prompt_index=index), attempt=attempt)
        features = self.store.put(
            key,
            {
                "input_ids": torch.arange(tokens, dtype=torch.int32),
                "loss_mask": torch.ones(tokens, dtype=torch.uint8),
                "final_state": torch.full((tokens, HIDDEN), float(index)),
            },
        )
        return SampleRef(
            attempt=key, contract_hash=contract, store=self.store.name, num_tokens=tokens, features=features
        )

    def plan(self, step: int, micro_batches: list[list[SampleRef]], revision: int = 0) -> StepPlan:
        return StepPlan(
            run_id="r",
            generation=1,
            step=step,
            kind=StepPlan.KIND_STEP,
            revision=revision,
            micro_batches=[MicroBatch(samples=refs) for refs in micro_batches],
        )


@pytest.fixture
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    bench = Bench(request.node.name)
    bench.loader.start()
    yield bench
    bench.loader.close()
    bench.store.close()


def test_windows_come_in_step_order_with_their_micro_batches(bench: Bench) -> None:
    refs = [bench.sample(index, tokens=2 + index) for index in range(4)]
    bench.loader.offer(bench.plan(2, [[refs[3]]]))
    bench.loader.offer(bench.plan(1, [[refs[0], refs[1]], [refs[2]]]))
    window = bench.loader.next(0, never)
    assert isinstance(window, Window)
    assert window.plan.step == 1
    assert [batch["states"].shape for batch in window.batches] == [(2, 3, HIDDEN), (1, 4, HIDDEN)]
    assert window.batches[1]["states"].eq(2.0).all()
    bench.loader.trained(1)
    window = bench.loader.next(0, never)
    assert isinstance(window, Window)
    assert window.plan.step == 2


def test_resolves_no_further_ahead_than_prefetch(bench: Bench) -> None:
    for step in range(1, 6):
        bench.loader.offer(bench.plan(step, [[bench.sample(step)]]))
    for _ in range(2):
        assert bench.store.seen.acquire(timeout=5)
    bench.loader.next(0, never)
    assert bench.store.read == [1, 2]
    bench.loader.trained(1)
    assert bench.store.seen.acquire(timeout=5)
    assert bench.store.read == [1, 2, 3]


def test_lost_objects_are_reported_once_and_the_new_plan_is_used(bench: Bench) -> None:
    kept, gone, altered = bench.sample(1), bench.sample(2), bench.sample(3)
    bench.store.remove([gone.features[2].key])
    altered.features[1].checksum ^= 1
    bench.loader.offer(bench.plan(1, [[kept, gone], [altered]]))
    report = bench.lost.get(timeout=5)
    assert [attempt.task.prompt_index for attempt in report.lost] == [2, 3]
    assert (report.step, report.revision, report.generation) == (1, 0, 1)
    assert gone.features[2].key in report.reason
    substitute = bench.sample(2, attempt=2)
    bench.loader.offer(bench.plan(1, [[kept, substitute]], revision=1))
    window = bench.loader.next(0, never)
    assert isinstance(window, Window)
    assert window.plan.revision == 1
    assert bench.lost.empty()


def test_wrong_number_of_rows_counts_as_lost(bench: Bench) -> None:
    ref = bench.sample(1)
    ref.num_tokens = 4
    bench.loader.offer(bench.plan(1, [[ref]]))
    assert "3 rows, the reference says 4" in bench.lost.get(timeout=5).reason


def test_infrastructure_failure_is_tried_again_and_not_reported(bench: Bench) -> None:
    bench.store.failures = 2
    bench.loader.offer(bench.plan(1, [[bench.sample(1)]]))
    assert isinstance(bench.loader.next(0, never), Window)
    assert bench.lost.empty()


def test_next_waits_for_the_revision_another_rank_has(bench: Bench) -> None:
    ref = bench.sample(1)
    bench.loader.offer(bench.plan(1, [[ref]]))
    assert isinstance(bench.loader.next(0, never), Window)
    polls = 0

    def twice() -> bool:
        nonlocal polls
        polls += 1
        return polls > 2

    assert bench.loader.next(1, twice) is None
    bench.loader.offer(bench.plan(1, [[ref]], revision=1))
    window = bench.loader.next(1, never)
    assert isinstance(window, Window)
    assert window.plan.revision == 1


def test_foreign_contract_ends_the_rank(bench: Bench) -> None:
    bench.loader.offer(bench.plan(1, [[bench.sample(1, contract="other")]]))
    with pytest.raises(ContractError, match="other"):
        bench.loader.next(0, never)


def test_end_comes_after_the_windows_before_it_and_stop_at_once(bench: Bench) -> None:
    bench.loader.offer(StepPlan(run_id="r", generation=1, step=2, kind=StepPlan.KIND_END))
    bench.loader.offer(bench.plan(1, [[bench.sample(1)]]))
    assert isinstance(bench.loader.next(0, never), Window)
    bench.loader.trained(1)
    end = bench.loader.next(0, never)
    assert isinstance(end, StepPlan)
    assert end.kind == StepPlan.KIND_END
    bench.loader.offer(StepPlan(run_id="r", generation=1, step=2, kind=StepPlan.KIND_STOP, reason="paused"))
    stop = bench.loader.next(0, never)
    assert isinstance(stop, StepPlan)
    assert stop.reason == "paused"


def test_empty_share_is_a_window(bench: Bench) -> None:
    bench.loader.offer(bench.plan(1, []))
    window = bench.loader.next(0, never)
    assert isinstance(window, Window)
    assert window.batches == []
