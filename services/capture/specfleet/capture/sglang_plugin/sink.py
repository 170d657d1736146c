"""From the states of a batch on the device to published objects. Lives in the scheduler process of SGLang.

Rows go straight to their place in a sample's tensors, which lie in memory that the store lends: so a chunked prompt needs no
stitching, a copy over PCIe is the only one, and put() moves the bytes without another. On CUDA the copies run on a stream of
their own, under the next forward pass. One thread checks, hashes and puts.

Shapes: N rows of a batch, T tokens of a prompt.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch

from specfleet.capture.sglang_plugin.request import CaptureRequest, FeatureTable, Origin, failure, success
from specfleet.contracts.errors import CaptureItemError, HostError, SpecfleetError, StoreError, StoreFullError
from specfleet.store.base import FeatureStore
from specfleet.store.tensors import hash_seconds
from specfleet.target.dtypes import DTYPES
from specfleet.wire.records_pb2 import FeatureSpec

log = logging.getLogger(__name__)

FINITE = "finite"
"""One flag per row beside the features: whether its states hold neither NaN nor infinity."""
_DTYPES = {**DTYPES, "int32": torch.int32, "uint8": torch.uint8, "bool": torch.bool}
_FROM_REQUEST = ("input_ids", "loss_mask")
# Between the first and the second try of a put; doubles up to 1 s.
_FIRST_DELAY_S = 0.02
# A broken connection is replaced at the next call; what takes longer is the caller's to retry.
_STORE_ERROR_S = 3.0


@dataclass
class Capture:
    """What is captured of one prompt. Written by the scheduler's thread, after `submit` by the sink's."""

    name: str
    """The server's id of the request."""
    request: CaptureRequest
    input_ids: Sequence[int]
    tensors: dict[str, torch.Tensor]
    """[T, elements], or [T] where a token has one: pooled memory that rows are copied into."""
    rows: int = 0
    """Rows that have arrived, from the first on."""
    copies: list[Callable[[], float]] = field(default_factory=list)
    """Each waits for a copy and returns the seconds it took for this sample."""
    failed: SpecfleetError | None = None
    abandoned: bool = False
    """Nobody waits for the answer any more: nothing is stored from now on."""
    submitted_at: float | None = None
    answer: dict[str, Any] | None = None

    @property
    def complete(self) -> bool:
        return self.rows >= self.request.num_tokens


@dataclass(frozen=True)
class Span:
    """Rows [first, first + count) of a batch are the prompt's tokens from `position` on."""

    capture: Capture
    first: int
    position: int
    count: int


class Sink:
    def __init__(self, store: FeatureStore, table: FeatureTable, origin: Origin, store_full_s: float) -> None:
        self.store = store
        self._table, self._origin, self._store_full_s = table, origin, store_full_s
        self._open: dict[str, Capture] = {}
        self._queue: SimpleQueue[Capture | None] = SimpleQueue()
        self._published: SimpleQueue[str] = SimpleQueue()
        self._closing = threading.Event()
        self._stream: torch.cuda.Stream | None = None
        # Daemon: a server that is told to stop must not wait for a full pool.
        self._writer = threading.Thread(target=self._run, name="specfleet-sink", daemon=True)
        self._writer.start()

    # In the scheduler's thread

    def begin(self, name: str, request: CaptureRequest, input_ids: Sequence[int]) -> Capture:
        """Memory for one prompt's states. Never waits."""
        tensors = {}
        for feature in request.features:
            if feature not in _FROM_REQUEST:
                dtype, elements = self._table[feature]
                shape = (request.num_tokens,) if elements == 1 else (request.num_tokens, elements)
                tensors[feature] = self.store.empty(shape, _DTYPES[dtype])
        tensors[FINITE] = torch.empty(request.num_tokens, dtype=torch.bool)
        capture = self._open[name] = Capture(name, request, input_ids, tensors)
        return capture

    def take(self, spans: Sequence[Span], states: Mapping[str, torch.Tensor]) -> None:
        """Copies the rows of a batch. `states`: [N, elements] or [N] on the device, in feature dtype, with FINITE."""
        spans = [span for span in spans if _continues(span)]
        if not spans:
            return
        total = sum(span.count for span in spans)
        finish = self._copy(spans, states)
        for span in spans:
            span.capture.rows = max(span.capture.rows, span.position + span.count)
            span.capture.copies.append(partial(_share, finish, span.count / total))
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

    def _copy(self, spans: Sequence[Span], states: Mapping[str, torch.Tensor]) -> Callable[[], float]:
        device = next(iter(states.values())).device
        if device.type != "cuda":
            started = time.perf_counter()
            _copy_rows(spans, states)
            seconds = time.perf_counter() - started
            return lambda: seconds
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            start.record()
            _copy_rows(spans, states)
            end.record()
        for tensor in states.values():
            tensor.record_stream(self._stream)

        def finish() -> float:
            end.synchronize()
            return float(start.elapsed_time(end)) / 1000

        return finish

    # In the writer's thread

    def _run(self) -> None:
        while (capture := self._queue.get()) is not None:
            capture.answer = self._publish(capture)
            capture.tensors = {}
            capture.copies = []
            self._published.put(capture.name)

    def _publish(self, capture: Capture) -> dict[str, Any]:
        request = capture.request
        assert capture.submitted_at is not None
        try:
            copy_s = sum(wait() for wait in capture.copies)
            waited_from, hashed_from = time.perf_counter(), hash_seconds()
            queued_s = waited_from - capture.submitted_at
            specs, put_s = self._put(capture, _finished(capture))
            done, hash_s = time.perf_counter(), hash_seconds() - hashed_from
            seconds = {
                "copy": copy_s,
                "wait": queued_s + done - waited_from - put_s,
                "hash": hash_s,
                "put": put_s - hash_s,
            }
            return success(request, self._origin, specs, seconds)
        except SpecfleetError as error:
            return failure(request.sample, error)
        except Exception as error:
            log.exception("specfleet: publishing %s failed", request.sample)
            return failure(request.sample, StoreError("SF-SGLANG-SINK", f"{type(error).__name__}: {error}"))

    def _put(self, capture: Capture, tensors: dict[str, torch.Tensor]) -> tuple[list[FeatureSpec], float]:
        """Specs, and the seconds of the put that succeeded. A full pool is waited for; raises the last StoreError."""
        assert capture.submitted_at is not None
        # From its submission on: those that queue at a full pool wait together, not one after the other.
        begun, delay = capture.submitted_at, _FIRST_DELAY_S
        while True:
            if capture.abandoned:
                raise HostError("SF-SGLANG-ABORTED", "the request was aborted before its features were stored")
            started = time.perf_counter()
            try:
                return self.store.put(capture.request.attempt, tensors), time.perf_counter() - started
            except StoreError as error:
                patience_s = self._store_full_s if isinstance(error, StoreFullError) else _STORE_ERROR_S
                final = error.code == "SF-STORE-KEY-EXISTS" or time.perf_counter() - begun + delay > patience_s
                if final or self._closing.wait(delay):
                    raise
                delay = min(delay * 2, 1.0)


def _share(finish: Callable[[], float], share: float) -> float:
    return finish() * share


def _continues(span: Span) -> bool:
    """Whether the rows follow those that arrived; fails the capture where some are missing."""
    capture = span.capture
    if span.position > capture.rows and capture.failed is None:
        capture.failed = HostError(
            "SF-SGLANG-SHORT", f"tokens {capture.rows} to {span.position - 1} were taken from a cache, not computed"
        )
    return capture.failed is None


def _copy_rows(spans: Sequence[Span], states: Mapping[str, torch.Tensor]) -> None:
    for span in spans:
        for name, tensor in span.capture.tensors.items():
            rows = states[name][span.first : span.first + span.count]
            tensor[span.position : span.position + span.count].copy_(rows, non_blocking=True)


def _finished(capture: Capture) -> dict[str, torch.Tensor]:
    """Every feature in table order, checked. Raises CaptureItemError SF-CAPTURE-NONFINITE."""
    request, tensors = capture.request, dict(capture.tensors)
    finite = tensors.pop(FINITE)
    bad = int((~finite).sum())
    if bad:
        first = int((~finite).nonzero()[0])
        raise CaptureItemError(
            "SF-CAPTURE-NONFINITE",
            f"the states of {bad} of {request.num_tokens} tokens are NaN or infinite, the first at token {first}",
        )
    tensors["input_ids"] = torch.tensor(list(capture.input_ids), dtype=torch.int32)
    tensors["loss_mask"] = torch.frombuffer(bytearray(request.loss_mask), dtype=torch.uint8)
    return {name: tensors[name] for name in request.features}
