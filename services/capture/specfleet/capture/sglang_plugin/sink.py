"""From the states of a batch on the device to published objects. Lives in the scheduler process of SGLang.

Rows go straight to their place in a sample's tensors, which lie in memory that the store lends: so a chunked prompt needs no
stitching, a copy over PCIe is the only one (copies.py), and a put moves the bytes without another. One thread checks whatever
is there and has it stored in one call. It shares Python's global lock with the scheduler: work per sample is kept small.

Shapes: N rows of a batch, T tokens of a prompt.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch

from specfleet.capture.sglang_plugin.copies import Copier, Copy, Pair
from specfleet.capture.sglang_plugin.request import CaptureRequest, FeatureTable, Origin, failure, success
from specfleet.contracts.errors import CaptureItemError, HostError, SpecfleetError, StoreError, StoreFullError
from specfleet.store.base import FeatureStore
from specfleet.store.tensors import hash_seconds
from specfleet.target.dtypes import DTYPES

log = logging.getLogger(__name__)

FINITE = "finite"
"""One flag per row beside the features: whether its states hold neither NaN nor infinity."""
_DTYPES = {**DTYPES, "int32": torch.int32, "uint8": torch.uint8, "bool": torch.bool}
# One put: enough to keep the store busy, little enough that the first of a batch is not held up by the last.
_BATCH_BYTES, _BATCH_SAMPLES = 64 << 20, 64
# Between the first and the second try of a put; doubles up to 1 s.
_FIRST_DELAY_S = 0.02
# A broken connection is replaced at the next call; what takes longer is the caller's to retry.
_STORE_ERROR_S = 3.0
# Of a tensor's place in a sample's memory: a cache line.
_ALIGNMENT = 64


@dataclass(eq=False)
class Capture:
    """What is captured of one prompt. Written by the scheduler's thread, after `submit` by the sink's."""

    name: str
    """The server's id of the request."""
    request: CaptureRequest
    input_ids: Sequence[int]
    tensors: dict[str, torch.Tensor]
    """FINITE and every feature: [T, elements], or [T] where a token has one."""
    rows: int = 0
    """Rows that have arrived, from the first on."""
    copies: list[tuple[Copy, float]] = field(default_factory=list)
    """Each with this sample's share of it."""
    failed: SpecfleetError | None = None
    abandoned: bool = False
    """Nobody waits for the answer any more: nothing is stored from now on."""
    submitted_at: float | None = None
    copy_s: float = 0.0
    answer: dict[str, Any] | None = None

    @property
    def complete(self) -> bool:
        return self.rows >= self.request.num_tokens

    @property
    def features(self) -> dict[str, torch.Tensor]:
        return {name: self.tensors[name] for name in self.request.features}

    def copied(self) -> bool:
        return all(copy.done() for copy, _ in self.copies)


@dataclass(frozen=True)
class Span:
    """Rows [first, first + count) of a batch are the prompt's tokens from `position` on."""

    capture: Capture
    first: int
    position: int
    count: int


class Sink:
    def __init__(
        self, store: FeatureStore, table: FeatureTable, origin: Origin, copier: Copier, store_full_s: float
    ) -> None:
        self.store = store
        self._table, self._copier, self._store_full_s = table, copier, store_full_s
        self._origin = asdict(origin)
        self._open: dict[str, Capture] = {}
        self._queue: SimpleQueue[Capture | None] = SimpleQueue()
        self._published: SimpleQueue[str] = SimpleQueue()
        self._closing = threading.Event()
        # Taken from the queue and not into a batch: one at most.
        self._next: list[Capture | None] = []
        # Daemon: a server that is told to stop must not wait for a full pool.
        self._writer = threading.Thread(target=self._run, name="specfleet-sink", daemon=True)
        self._writer.start()

    def reserve(self, pending_bytes: int) -> None:
        """Memory for what may be under way at a time, before the first capture."""
        try:
            # Prompts of many lengths leave gaps.
            self.store.reserve(pending_bytes + pending_bytes // 4, self._copier.page_lock)
        except StoreError as error:
            log.warning("specfleet: %s; until it is there captures go through other memory", error)

    # In the scheduler's thread

    def begin(self, name: str, request: CaptureRequest, input_ids: Sequence[int]) -> Capture:
        """Memory for one prompt's features, in one piece. Never waits."""
        tokens = request.num_tokens
        wanted = {feature: self._table[feature] for feature in request.features} | {FINITE: ("bool", 1)}
        places, size = {}, 0
        for feature, (dtype, elements) in wanted.items():
            num_bytes = tokens * elements * _DTYPES[dtype].itemsize
            places[feature] = (size, size + num_bytes)
            size += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        memory = self._copier.locked(self.store.empty([size], torch.uint8))
        tensors = {}
        for feature, (dtype, elements) in wanted.items():
            first, end = places[feature]
            tensor = memory[first:end].view(_DTYPES[dtype])
            tensors[feature] = tensor if elements == 1 else tensor.view(tokens, elements)
        capture = self._open[name] = Capture(name, request, input_ids, tensors)
        return capture

    def take(self, spans: Sequence[Span], states: Mapping[str, torch.Tensor]) -> None:
        """Copies the rows of a batch. `states`: [N, elements] or [N] on the device, in feature dtype, with FINITE."""
        spans = [span for span in spans if _continues(span)]
        if not spans:
            return
        total = sum(span.count for span in spans)
        copy = self._copier.start(_pairs(spans, states), list(states.values()))
        for span in spans:
            span.capture.rows = max(span.capture.rows, span.position + span.count)
            span.capture.copies.append((copy, span.count / total))
            if span.capture.complete:
                self.submit(span.capture)

    def submit(self, capture: Capture) -> None:
        capture.submitted_at = time.perf_counter()
        self._queue.put(capture)

    def published(self) -> list[str]:
        """Names of captures answered since the last call, successfully or not."""
        names = []
        while not self._published.empty():
            names.append(self._published.get())
            self.forget(names[-1])
        return names

    def abandon(self, matches: Callable[[str], bool]) -> None:
        for name, capture in self._open.items():
            capture.abandoned = capture.abandoned or matches(name)

    def forget(self, name: str) -> None:
        """The capture was answered, by this sink or otherwise."""
        self._open.pop(name, None)

    def close(self) -> None:
        """Answers what was submitted, then ends the thread and the store."""
        self._closing.set()
        self._queue.put(None)
        self._writer.join()
        self.store.close()

    # In the writer's thread

    def _run(self) -> None:
        while batch := self._batch():
            try:
                self._publish(batch)
            except Exception as error:
                log.exception("specfleet: publishing %d captures failed", len(batch))
                for capture in batch:
                    if capture.answer is None:
                        self._fail(capture, StoreError("SF-SGLANG-SINK", f"{type(error).__name__}: {error}"))

    def _batch(self) -> list[Capture]:
        """What can be put now, in order; empty at the end. Waits for a first capture and its copies, for no other's."""
        batch: list[Capture] = []
        num_bytes = 0
        while len(batch) < _BATCH_SAMPLES:
            if not self._next:
                if batch and self._queue.empty():
                    break
                self._next.append(self._queue.get())
            capture = self._next[0]
            if capture is None:
                break
            num_bytes += capture.request.num_bytes
            if batch and (num_bytes > _BATCH_BYTES or not capture.copied()):
                break
            self._next.clear()
            capture.copy_s = sum(copy.wait() * share for copy, share in capture.copies)
            batch.append(capture)
        return batch

    def _publish(self, batch: Sequence[Capture]) -> None:
        """Answers all of a batch. A full pool is waited for."""
        waiting = []
        for capture in batch:
            if error := _nonfinite(capture):
                self._fail(capture, error)
            else:
                _fill(capture)
                waiting.append(capture)
        delay = _FIRST_DELAY_S
        while waiting := self._put(waiting, delay):
            self._closing.wait(delay)
            delay = min(delay * 2, 1.0)

    def _put(self, captures: Sequence[Capture], delay: float) -> list[Capture]:
        """One put of them all; returns those for which another, `delay` seconds later, is worth it."""
        wanted = []
        for capture in captures:
            if capture.abandoned:
                why = "the request was aborted before its features were stored"
                self._fail(capture, HostError("SF-SGLANG-ABORTED", why))
            else:
                wanted.append(capture)
        if not wanted:
            return []
        started, hashed_from = time.perf_counter(), hash_seconds()
        outcomes = self.store.put_many([(capture.request.attempt, capture.features) for capture in wanted])
        done, hash_s = time.perf_counter(), hash_seconds() - hashed_from
        total = sum(capture.request.num_bytes for capture in wanted)
        again = []
        for capture, outcome in zip(wanted, outcomes, strict=True):
            assert capture.submitted_at is not None
            if not isinstance(outcome, StoreError):
                share = capture.request.num_bytes / total
                seconds = {
                    "copy": capture.copy_s,
                    "wait": done - capture.submitted_at - (done - started) * share,
                    "hash": hash_s * share,
                    "put": (done - started - hash_s) * share,
                }
                self._answer(capture, success(capture.request, self._origin, outcome, seconds))
            # From its submission on: those that queue at a full pool wait together, not one after the other.
            elif self._worth_waiting(outcome, done + delay - capture.submitted_at):
                again.append(capture)
            else:
                self._fail(capture, outcome)
        return again

    def _worth_waiting(self, error: StoreError, waited_s: float) -> bool:
        patience_s = self._store_full_s if isinstance(error, StoreFullError) else _STORE_ERROR_S
        return error.code != "SF-STORE-KEY-EXISTS" and waited_s <= patience_s and not self._closing.is_set()

    def _fail(self, capture: Capture, error: SpecfleetError) -> None:
        self._answer(capture, failure(capture.request.sample, error))

    def _answer(self, capture: Capture, answer: dict[str, Any]) -> None:
        # Its memory goes back to the store.
        capture.tensors = {}
        capture.copies = []
        capture.answer = answer
        self._published.put(capture.name)


def _continues(span: Span) -> bool:
    """Whether the rows follow those that arrived; fails the capture where some are missing."""
    capture = span.capture
    if span.position > capture.rows and capture.failed is None:
        capture.failed = HostError(
            "SF-SGLANG-SHORT", f"tokens {capture.rows} to {span.position - 1} were taken from a cache, not computed"
        )
    return capture.failed is None


def _pairs(spans: Sequence[Span], states: Mapping[str, torch.Tensor]) -> Iterator[Pair]:
    for span in spans:
        for name, tensor in span.capture.tensors.items():
            if name in states:
                rows = states[name][span.first : span.first + span.count]
                yield tensor[span.position : span.position + span.count], rows


def _fill(capture: Capture) -> None:
    """What comes with the request. Not before the rows: the memory may be that of a capture that ended early, with copies
    under way; these are done when those of its next owner, behind them in the stream, are."""
    if "input_ids" in capture.tensors:
        capture.tensors["input_ids"].numpy()[:] = capture.input_ids
    if "loss_mask" in capture.tensors:
        capture.tensors["loss_mask"].numpy()[:] = np.frombuffer(capture.request.loss_mask, np.uint8)


def _nonfinite(capture: Capture) -> CaptureItemError | None:
    finite = capture.tensors[FINITE].numpy()
    if finite.all():
        return None
    bad = np.flatnonzero(~finite)
    return CaptureItemError(
        "SF-CAPTURE-NONFINITE",
        f"the states of {len(bad)} of {capture.request.num_tokens} tokens are NaN or infinite, the first at token {bad[0]}",
    )
