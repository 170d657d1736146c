"""First-fit allocation inside one registered region, so that its pages are touched and registered once."""

import threading
import time
from bisect import insort
from collections import deque

# A page: neighbours never share one, and every dtype is aligned.
ALIGNMENT = 4096


def aligned(num_bytes: int) -> int:
    """num_bytes rounded up to whole pages."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class Arena:
    """Blocks of an address range [base, base + size). Thread-safe; neighbouring free blocks are merged."""

    def __init__(self, base: int, size: int) -> None:
        self.base = base
        self.size = size
        self._free = [(base, size)]
        self._used: dict[int, int] = {}
        # Blocks given back by finalizers. These run wherever garbage collection strikes, even in a thread that holds
        # the lock, so they only append here.
        self._returned: deque[int] = deque()
        self._changed = threading.Condition()

    def contains(self, address: int, num_bytes: int) -> bool:
        return self.base <= address and address + num_bytes <= self.base + self.size

    def try_acquire(self, num_bytes: int) -> int | None:
        """Address of a block, or None when no free gap is long enough."""
        with self._changed:
            return self._take(aligned(num_bytes))

    def acquire(self, num_bytes: int, timeout_s: float) -> int:
        """Waits for a block. Raises TimeoutError; ValueError when it could never fit."""
        need = aligned(num_bytes)
        if need > self.size:
            raise ValueError(f"{num_bytes} bytes do not fit an arena of {self.size}")
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while (address := self._take(need)) is None:
                if not self._changed.wait(deadline - time.monotonic()):
                    raise TimeoutError(f"no {num_bytes} bytes free within {timeout_s:g} s")
            return address

    def release(self, address: int) -> None:
        with self._changed:
            self._merge(address)
            self._changed.notify_all()

    def release_later(self, address: int) -> None:
        """Like release, without a lock: the block becomes free at the next acquire."""
        self._returned.append(address)

    def in_use(self) -> int:
        """Blocks handed out and not given back."""
        with self._changed:
            self._drain()
            return len(self._used)

    def _take(self, need: int) -> int | None:
        self._drain()
        for index, (start, length) in enumerate(self._free):
            if length >= need:
                if length == need:
                    del self._free[index]
                else:
                    self._free[index] = (start + need, length - need)
                self._used[start] = need
                return start
        return None

    def _drain(self) -> None:
        while self._returned:
            self._merge(self._returned.popleft())

    def _merge(self, address: int) -> None:
        insort(self._free, (address, self._used.pop(address)))
        merged: list[tuple[int, int]] = []
        for start, length in self._free:
            if merged and merged[-1][0] + merged[-1][1] == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((start, length))
        self._free = merged
