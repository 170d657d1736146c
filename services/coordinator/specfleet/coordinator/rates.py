"""What happened in the last 30 seconds: tokens captured and trained, and how much of the ranks' time was waiting."""

import time
from collections import deque
from collections.abc import Callable

WINDOW_S = 30.0


class Recent:
    """A sum over the last WINDOW_S seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._entries: deque[tuple[float, float]] = deque()
        self._sum = 0.0

    def add(self, amount: float) -> None:
        self._entries.append((self._clock(), amount))
        self._sum += amount

    def total(self) -> float:
        horizon = self._clock() - WINDOW_S
        while self._entries and self._entries[0][0] < horizon:
            self._sum -= self._entries.popleft()[1]
        return self._sum if self._entries else 0.0

    def per_second(self) -> float:
        return self.total() / WINDOW_S


class Rates:
    """Of one run. Not durable: after a restart they build up again within one window."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.captured = Recent(clock)
        self.trained = Recent(clock)
        self.step = Recent(clock)
        self.wait = Recent(clock)

    def wait_share(self) -> float:
        """Waiting / (waiting + working), 0..1; 0 when no step was acked lately."""
        busy, waiting = self.step.total(), self.wait.total()
        return waiting / (busy + waiting) if busy + waiting > 0 else 0.0
