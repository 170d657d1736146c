"""Back-pressure: bytes and samples are reserved before capture, between a low and a high mark with hysteresis."""

from dataclasses import dataclass

from specfleet.contracts.errors import ConfigError

# The rest of the pool absorbs allocator slack and objects whose deletion is not confirmed yet.
POOL_HIGH_FRACTION = 0.85
LOW_FRACTION = 0.75


@dataclass(frozen=True)
class Marks:
    low_bytes: int
    high_bytes: int
    low_samples: int
    high_samples: int


@dataclass(frozen=True)
class Held:
    """What is reserved now: from dispatch until the deletion of the sample's objects is confirmed."""

    num_bytes: int
    num_samples: int


def derive_marks(
    *, high_bytes: int, low_bytes: int, high_samples: int, low_samples: int, capacity_bytes: int, sharing: int = 1
) -> Marks:
    """Marks of one run in a pool that `sharing` active runs use. 0 means: derive it.

    high: 85 % of the run's share of the pool; low: 75 % of high. A configured mark never exceeds the run's share.
    """
    ceiling = int(capacity_bytes * POOL_HIGH_FRACTION) // max(1, sharing)
    high = min(high_bytes or ceiling, ceiling)
    low = min(low_bytes or int(high * LOW_FRACTION), high)
    return Marks(low, high, low_samples, high_samples)


def check_window_fits(
    marks: Marks, *, capacity_bytes: int, window_samples: int, window_bytes: int, bytes_per_token: int, store: str
) -> None:
    """Raises ConfigError SF-FLOW-WINDOW-TOO-LARGE, with every number, when the largest window exceeds a low mark.

    The low mark decides, not the high one: dispatch that stopped at the high mark resumes below the low mark, so a window
    between the two would never be completed. store: the pool's name, or "" while none is known.
    """
    if window_samples > marks.low_samples or window_bytes > marks.low_bytes:
        pool = f"pool {store!r} holds {capacity_bytes} bytes" if store else "no pool has reported its size yet"
        raise ConfigError(
            "SF-FLOW-WINDOW-TOO-LARGE",
            f"one window does not fit: {window_samples} samples and at most {window_bytes} bytes "
            f"({bytes_per_token} bytes per token), but the low marks are {marks.low_samples} samples and {marks.low_bytes} bytes "
            f"(high marks {marks.high_samples} samples and {marks.high_bytes} bytes; {pool}). "
            "Training would wait for ever. Use a larger pool, a smaller flow.global_batch, a smaller data.max_length, or "
            "higher flow.low_* and flow.high_* marks",
        )


@dataclass
class CreditGate:
    """Hysteresis: closes when the next sample would pass a high mark, opens again at or below both low marks."""

    closed: bool = False

    def admit(self, marks: Marks, held: Held, num_bytes: int, *, urgent: bool = False) -> bool:
        """True when a sample of num_bytes may be reserved on top of `held`.

        urgent: a sample that an earlier window waits for (a retry, or a lost one). It may pass a closed gate, since the
        gate opens only when windows are trained, but it never passes a high mark.
        """
        fits = held.num_bytes + num_bytes <= marks.high_bytes and held.num_samples + 1 <= marks.high_samples
        if self.closed and held.num_bytes <= marks.low_bytes and held.num_samples <= marks.low_samples:
            self.closed = False
        if not fits and held.num_bytes + held.num_samples > 0:
            self.closed = True
        return fits and (urgent or not self.closed)
