"""How long a claimed prompt belongs to its worker. Times are unix milliseconds, because they outlive the process."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LeasePolicy:
    """A lease lasts `lease_s` from its last renewal; every heartbeat that names the claim renews it."""

    lease_s: float

    def deadline_ms(self, now_ms: int) -> int:
        return now_ms + int(self.lease_s * 1000)

    def expired(self, deadline_ms: int, now_ms: int) -> bool:
        """A lease is over strictly after its deadline: a renewal that arrives on the deadline still counts."""
        return now_ms > deadline_ms

    def restart_deadline_ms(self, deadline_ms: int, now_ms: int) -> int:
        """The deadline after the coordinator was away: nobody could renew meanwhile, so each lease gets a full term."""
        return max(deadline_ms, self.deadline_ms(now_ms))
