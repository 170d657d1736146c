"""Rows from the device to the host. On CUDA into page-locked memory, on a stream of their own, under the next forward pass."""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch

log = logging.getLogger(__name__)

Pair = tuple[torch.Tensor, torch.Tensor]
"""Where rows go, and the rows: same shape and dtype."""


class Copy(Protocol):
    """Copies that were started together."""

    def done(self) -> bool: ...

    def wait(self) -> float:
        """Until they are done; returns the seconds they took."""
        ...


class Copier(Protocol):
    def page_lock(self, address: int, num_bytes: int) -> Callable[[], None]:
        """For FeatureStore.reserve."""
        ...

    def locked(self, memory: torch.Tensor) -> torch.Tensor:
        """`memory`, or as much of the copier's own where that is too slow to copy into. Never waits."""
        ...

    def start(self, pairs: Iterable[Pair], sources: Sequence[torch.Tensor]) -> Copy:
        """`sources`: the tensors that the rows of all pairs are views of; they may be dropped at once."""
        ...


def copier_for(device: torch.device) -> Copier:
    return CudaCopier(device) if device.type == "cuda" else HostCopier()


class HostCopier:
    """From memory to memory, at once."""

    def page_lock(self, address: int, num_bytes: int) -> Callable[[], None]:
        return lambda: None

    def locked(self, memory: torch.Tensor) -> torch.Tensor:
        return memory

    def start(self, pairs: Iterable[Pair], sources: Sequence[torch.Tensor]) -> Copy:
        started = time.perf_counter()
        for to, rows in pairs:
            to.copy_(rows)
        return _Done(time.perf_counter() - started)


class _Done:
    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def done(self) -> bool:
        return True

    def wait(self) -> float:
        return self._seconds


class CudaCopier:
    """A copy into memory that is not page-locked would hold up the thread that starts it, and run at a tenth of the speed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def page_lock(self, address: int, num_bytes: int) -> Callable[[], None]:
        if code := self._driver("cudaHostRegister", address, num_bytes, 0):
            log.warning(
                "specfleet: cudaHostRegister of %d bytes of the store's memory returned %d: captures are copied once more",
                num_bytes,
                code,
            )
            return lambda: None

        def unlock() -> None:
            self._driver("cudaHostUnregister", address)

        return unlock

    def locked(self, memory: torch.Tensor) -> torch.Tensor:
        return memory if memory.is_pinned() else torch.empty_like(memory, pin_memory=True)

    def start(self, pairs: Iterable[Pair], sources: Sequence[torch.Tensor]) -> Copy:
        # Blocking: the thread that waits must not spin beside the scheduler's.
        begin, end = (torch.cuda.Event(enable_timing=True, blocking=True) for _ in range(2))
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            begin.record()
            for to, rows in pairs:
                to.copy_(rows, non_blocking=True)
            end.record()
        for source in sources:
            source.record_stream(self._stream)
        return _Transfer(begin, end)

    def _driver(self, function: str, *arguments: int) -> int:
        """The error code of a call. In a thread of its own: CUDA keeps a failed call's error for the next one of its thread."""

        def call() -> int:
            with torch.cuda.device(self._device):
                return int(getattr(torch.cuda.cudart(), function)(*arguments))

        with ThreadPoolExecutor(max_workers=1) as own_thread:
            return own_thread.submit(call).result()


class _Transfer:
    def __init__(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> None:
        self._begin, self._end = begin, end
        self._seconds: float | None = None

    def done(self) -> bool:
        return self._seconds is not None or self._end.query()

    def wait(self) -> float:
        # Asked by every sample of the batch.
        if self._seconds is None:
            self._end.synchronize()
            self._seconds = self._begin.elapsed_time(self._end) / 1000
        return self._seconds
