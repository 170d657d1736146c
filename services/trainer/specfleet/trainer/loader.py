"""From references to micro-batches: resolves planned windows ahead of training, in one thread."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog
import torch

from specfleet.contracts.errors import ContractError, FeatureLostError, StoreError
from specfleet.contracts.ids import sample_id
from specfleet.store.base import FeatureSource
from specfleet.trainer.plans import PlanBook
from specfleet.wire.records_pb2 import SampleRef, StepPlan, TaskAttempt
from specfleet.wire.trainer_pb2 import ReportLostRequest

log = structlog.get_logger()

_POLL_S = 0.1
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0


Tensors = dict[str, torch.Tensor]
Collate = Callable[[Sequence[Tensors]], Tensors]
"""Features of a micro-batch's samples → one batch (strategies/base.py)."""


@dataclass
class Window:
    """One step's share of this rank: collated CPU micro-batches; none at all is legal (a short last window)."""

    plan: StepPlan
    batches: list[Tensors]


class Loader:
    """Keeps `prefetch` windows resolved ahead.

    A lost object is reported and the window waits for its plan to be issued again; any other store failure is tried
    again for ever, with back-off, because it says nothing about the samples.
    """

    def __init__(
        self,
        store: FeatureSource,
        collate: Collate,
        book: PlanBook,
        *,
        contract_hash: str,
        prefetch: int,
        report_lost: Callable[[ReportLostRequest], None],
    ) -> None:
        self._store = store
        self._collate = collate
        self._book = book
        self._contract_hash = contract_hash
        self._prefetch = prefetch
        self._report_lost = report_lost
        self._condition = threading.Condition()
        self._ready: dict[int, Window] = {}
        self._lost: set[tuple[int, int]] = set()
        self._failure: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="loader", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def offer(self, plan: StepPlan) -> None:
        """A plan from the bus; any thread."""
        with self._condition:
            if self._book.offer(plan):
                self._condition.notify_all()

    def next(self, min_revision: int, leave: Callable[[], bool]) -> Window | StepPlan | None:
        """What to do next: the window of the next step, or its KIND_END plan, or a KIND_STOP plan; None once leave().

        Blocks until then. Raises what the prefetch thread failed with.
        """
        with self._condition:
            while True:
                if self._failure is not None:
                    raise self._failure
                if leave():
                    return None
                if self._book.stop is not None:
                    return self._book.stop
                plan = self._book.get(self._book.next_step)
                if plan is not None and plan.revision >= min_revision:
                    if plan.kind == StepPlan.KIND_END:
                        return plan
                    window = self._ready.get(plan.step)
                    if window is not None and window.plan.revision == plan.revision:
                        return window
                self._condition.wait(_POLL_S)

    def trained(self, step: int) -> None:
        """The step is done: its window is freed and the next ones may be resolved."""
        with self._condition:
            self._book.trained(step)
            self._ready = {ahead: window for ahead, window in self._ready.items() if ahead > step}
            self._lost = {(ahead, revision) for ahead, revision in self._lost if ahead > step}
            self._condition.notify_all()

    def close(self) -> None:
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout=10.0)

    def _run(self) -> None:
        try:
            while (plan := self._next_to_resolve()) is not None:
                window = self._resolve(plan)
                with self._condition:
                    if window is not None and self._book.get(plan.step) is plan:
                        self._ready[plan.step] = window
                    self._condition.notify_all()
        except BaseException as error:
            with self._condition:
                self._failure = error
                self._condition.notify_all()

    def _next_to_resolve(self) -> StepPlan | None:
        with self._condition:
            while not self._closed:
                for plan in self._book.ahead(self._prefetch):
                    window = self._ready.get(plan.step)
                    stale = window is None or window.plan.revision != plan.revision
                    if stale and (plan.step, plan.revision) not in self._lost:
                        # The replaced window's memory goes before the new one's comes.
                        self._ready.pop(plan.step, None)
                        return plan
                self._condition.wait()
            return None

    def _resolve(self, plan: StepPlan) -> Window | None:
        """None when objects were lost (reported), when the plan was replaced meanwhile, or on close."""
        batches, lost, reasons = [], [], []
        for micro_batch in plan.micro_batches:
            samples = []
            for ref in micro_batch.samples:
                try:
                    features = self._get(ref, plan)
                except FeatureLostError as error:
                    lost.append(ref.attempt)
                    reasons.append(error.message)
                    continue
                if features is None:
                    return None
                samples.append(features)
            if samples and not lost:
                batches.append(self._collate(samples))
        if lost:
            self._report(plan, lost, reasons)
            return None
        return Window(plan, batches)

    def _get(self, ref: SampleRef, plan: StepPlan) -> Tensors | None:
        """One sample's features. None when the plan no longer counts."""
        if ref.contract_hash != self._contract_hash:
            raise ContractError(
                "SF-TRAIN-CONTRACT",
                f"sample {sample_id(ref.attempt)} was captured under contract {ref.contract_hash}, "
                f"this run trains on {self._contract_hash}",
            )
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                features = self._store.get(ref)
            except FeatureLostError:
                raise
            except StoreError as error:
                log.warning(
                    "store failed; trying again", sample=sample_id(ref.attempt), reason=str(error), in_s=pause_s
                )
            else:
                _check_length(ref, features)
                # What random draws of a strategy depend on, so that a repeated or resumed step repeats them.
                features["visit"] = torch.tensor([ref.attempt.task.epoch, ref.attempt.task.prompt_index])
                return features
            with self._condition:
                self._condition.wait_for(lambda: self._closed or self._book.get(plan.step) is not plan, timeout=pause_s)
                if self._closed or self._book.get(plan.step) is not plan:
                    return None
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _report(self, plan: StepPlan, lost: list[TaskAttempt], reasons: list[str]) -> None:
        log.warning("features lost", step=plan.step, revision=plan.revision, samples=[sample_id(a) for a in lost])
        with self._condition:
            self._lost.add((plan.step, plan.revision))
        self._report_lost(
            ReportLostRequest(
                run_id=plan.run_id,
                generation=plan.generation,
                step=plan.step,
                rank=plan.rank,
                revision=plan.revision,
                lost=lost,
                # The first few say enough; a whole window's worth would not fit an error message.
                reason="; ".join(reasons[:3]),
            )
        )


def _check_length(ref: SampleRef, features: Tensors) -> None:
    for name, tensor in features.items():
        if tensor.shape[0] != ref.num_tokens:
            raise FeatureLostError(
                "SF-TRAIN-LENGTH",
                f"{sample_id(ref.attempt)}: {name} has {tensor.shape[0]} rows, the reference says {ref.num_tokens}",
            )


def page_locked(collate: Collate, device: torch.device) -> Collate:
    """For a GPU, a collate whose tensors are page-locked: copies to the device then wait for nothing, and nothing for them."""
    if device.type != "cuda":
        return collate
    return lambda samples: {name: tensor.pin_memory() for name, tensor in collate(samples).items()}


class Stopwatch:
    """Seconds since the last lap, for wait_s and step_s."""

    def __init__(self) -> None:
        self._since = time.perf_counter()

    def lap(self) -> float:
        now = time.perf_counter()
        elapsed, self._since = now - self._since, now
        return elapsed
