"""Average rates of a run, measured from its snapshots as a client sees them."""

from dataclasses import dataclass, field

from specfleet.wire.run_pb2 import RunSnapshot


@dataclass
class _Counter:
    """A counter that only rises, and the span in which it rose: idle time before and after does not count."""

    first_at: float | None = None
    first: int = 0
    last_at: float = 0.0
    last: int = 0

    def add(self, now: float, value: int) -> None:
        if self.first_at is None or (self.last == self.first and value == self.last):
            self.first_at, self.first, self.last_at, self.last = now, value, now, value
        elif value > self.last:
            self.last_at, self.last = now, value

    @property
    def per_s(self) -> float:
        """Average over the span; 0 while it never moved."""
        elapsed = self.last_at - (self.first_at or 0.0)
        return (self.last - self.first) / elapsed if elapsed > 0 else 0.0


@dataclass
class RateMeter:
    """Tokens per second captured and trained, and the largest number of bytes in flight."""

    captured: _Counter = field(default_factory=_Counter)
    trained: _Counter = field(default_factory=_Counter)
    waits: list[float] = field(default_factory=list)
    peak_in_flight_bytes: int = 0

    def add(self, now: float, run: RunSnapshot) -> None:
        """now: monotonic seconds."""
        self.captured.add(now, run.captured_tokens)
        self.trained.add(now, run.trained_tokens)
        self.peak_in_flight_bytes = max(self.peak_in_flight_bytes, run.in_flight_bytes)
        if run.trained_steps and run.train_rate > 0:
            self.waits.append(run.wait_share)

    @property
    def wait_share(self) -> float:
        return sum(self.waits) / len(self.waits) if self.waits else 0.0
