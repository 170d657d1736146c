"""The worker's book of work in hand: which attempts it holds, which are claimed, which were revoked. No I/O."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from specfleet.bus.base import Message
from specfleet.contracts.ids import sample_id
from specfleet.wire.records_pb2 import PromptTask, TaskAttempt


@dataclass(eq=False)
class Work:
    """One prompt from fetch to ack."""

    task: PromptTask
    message: Message
    claimed: bool = False
    revoked: bool = False
    """The coordinator no longer counts this attempt: drop it at the next opportunity."""
    id: str = field(init=False)

    def __post_init__(self) -> None:
        self.id = sample_id(self.task.attempt)

    @property
    def num_tokens(self) -> int:
        return len(self.task.input_ids)


class Held:
    def __init__(self) -> None:
        self._work: dict[str, Work] = {}

    def __len__(self) -> int:
        return len(self._work)

    def add(self, work: Work) -> bool:
        """False when the attempt is in hand already: the bus delivered it again; the newer one is to be acked."""
        known = self._work.get(work.id)
        if known is not None:
            known.message = work.message
            return False
        self._work[work.id] = work
        return True

    def end(self, work: Work) -> None:
        self._work.pop(work.id, None)

    def revoke(self, attempts: Iterable[TaskAttempt]) -> int:
        """Marks attempts the coordinator disowned; returns how many were in hand."""
        found = [work for attempt in attempts if (work := self._work.get(sample_id(attempt))) is not None]
        for work in found:
            work.revoked = True
        return len(found)

    def claims(self) -> list[TaskAttempt]:
        """Attempts whose leases must be renewed."""
        return [work.task.attempt for work in self._work.values() if work.claimed and not work.revoked]

    def messages(self) -> list[Message]:
        """Messages whose ack deadline must be extended."""
        return [work.message for work in self._work.values()]
