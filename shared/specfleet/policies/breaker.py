"""The circuit breaker of one capture worker: opens after consecutive INFRA failures, probes half-open, closes again."""

from dataclasses import dataclass
from enum import StrEnum

# Three in a row is not bad luck; a single time-out is.
FAILURES_TO_OPEN = 3
# The first probe comes soon (a restart takes seconds); a server that stays down is asked about once a minute.
FIRST_BACKOFF_MS = 2_000
MAX_BACKOFF_MS = 60_000
# A probe whose outcome never arrives (the worker died with it) is forgotten after this long.
PROBE_TIMEOUT_MS = 120_000


class BreakerState(StrEnum):
    CLOSED = "CLOSED"
    OPEN = "OPEN"
    HALF_OPEN = "HALF_OPEN"


@dataclass
class Breaker:
    """Times are unix milliseconds; the record is stored with the worker, so a coordinator restart does not forget it."""

    state: BreakerState = BreakerState.CLOSED
    failures: int = 0
    backoff_ms: int = FIRST_BACKOFF_MS
    until_ms: int = 0
    """OPEN: when the next probe may start. HALF_OPEN: when the probe is given up."""

    def may_pull(self, now_ms: int) -> bool:
        """True when the worker may take prompts now. An OPEN breaker whose back-off has passed becomes HALF_OPEN."""
        if self.state is not BreakerState.CLOSED and now_ms >= self.until_ms:
            self.state = BreakerState.HALF_OPEN
            self.until_ms = now_ms + PROBE_TIMEOUT_MS
        return self.state is not BreakerState.OPEN

    def succeeded(self) -> None:
        self.state, self.failures, self.backoff_ms, self.until_ms = BreakerState.CLOSED, 0, FIRST_BACKOFF_MS, 0

    def failed(self, now_ms: int) -> None:
        self.failures += 1
        if self.state is BreakerState.HALF_OPEN:
            self.backoff_ms = min(self.backoff_ms * 2, MAX_BACKOFF_MS)
        if self.state is BreakerState.HALF_OPEN or (
            self.state is BreakerState.CLOSED and self.failures >= FAILURES_TO_OPEN
        ):
            self.state, self.until_ms = BreakerState.OPEN, now_ms + self.backoff_ms

    def to_dict(self) -> dict[str, str | int]:
        return {
            "state": str(self.state), "failures": self.failures, "backoff_ms": self.backoff_ms, "until_ms": self.until_ms
        }  # fmt: skip

    @classmethod
    def from_dict(cls, record: dict[str, str | int]) -> "Breaker":
        if not record:
            return cls()
        return cls(
            BreakerState(str(record["state"])),
            int(record["failures"]),
            int(record["backoff_ms"]),
            int(record["until_ms"]),
        )
