"""The worker's book of work in hand."""

from specfleet.capture.held import Held, Work
from specfleet.contracts.ids import task_key
from specfleet.wire.records_pb2 import PromptTask, TaskAttempt


class _Message:
    def __init__(self) -> None:
        self.data, self.subject = b"", "prompts.c.r"

    async def ack(self) -> None: ...
    async def nak(self, delay_s: float = 0.0) -> None: ...
    async def in_progress(self) -> None: ...


def _work(index: int, attempt: int = 1) -> Work:
    return Work(PromptTask(attempt=TaskAttempt(task=task_key("r", 0, index), attempt=attempt)), _Message())


def test_a_repeated_delivery_is_the_same_work_with_a_newer_message() -> None:
    held, first, again = Held(), _work(1), _work(1)
    assert held.add(first)
    assert not held.add(again)
    assert first.message is again.message
    assert len(held) == 1


def test_another_attempt_is_other_work() -> None:
    held = Held()
    assert held.add(_work(1, 1))
    assert held.add(_work(1, 2))


def test_only_claimed_and_unrevoked_attempts_are_renewed() -> None:
    held = Held()
    fetched, claimed, revoked = _work(1), _work(2), _work(3)
    for work in (fetched, claimed, revoked):
        held.add(work)
    claimed.claimed = revoked.claimed = True
    assert held.revoke([revoked.task.attempt, _work(9).task.attempt]) == 1
    assert held.claims() == [claimed.task.attempt]
    assert len(held.messages()) == 3
    held.end(claimed)
    assert held.claims() == []
