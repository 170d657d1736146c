"""The in-memory bus against a clock that the test moves: redelivery, delays, duplicate window, bounds."""

import pytest

from specfleet.bus.factory import open_bus
from specfleet.bus.memory import MemoryBroker, MemoryBus
from specfleet.bus.streams import DUPLICATE_WINDOW_S, STREAMS


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def bus(clock: Clock) -> MemoryBus:
    return MemoryBus(broker=MemoryBroker(clock))


async def test_a_message_comes_again_exactly_after_its_ack_wait(bus: MemoryBus, clock: Clock) -> None:
    subscription = await bus.subscribe("samples.*", "c", ack_wait_s=10)
    await bus.publish("samples.r", b"1")
    (first,) = await subscription.fetch(5, 0)
    clock.now += 9.9
    assert await subscription.fetch(5, 0) == []
    await first.in_progress()
    clock.now += 9.9
    assert await subscription.fetch(5, 0) == []
    clock.now += 0.2
    (again,) = await subscription.fetch(5, 0)
    await again.ack()
    clock.now += 100
    assert await subscription.fetch(5, 0) == []


async def test_nak_delays_delivery(bus: MemoryBus, clock: Clock) -> None:
    subscription = await bus.subscribe("samples.*", "c")
    await bus.publish("samples.r", b"1")
    await (await subscription.fetch(1, 0))[0].nak(delay_s=5)
    assert await subscription.fetch(1, 0) == []
    clock.now += 5
    await (await subscription.fetch(1, 0))[0].nak()
    assert len(await subscription.fetch(1, 0)) == 1


async def test_ids_are_forgotten_after_the_duplicate_window(bus: MemoryBus, clock: Clock) -> None:
    await bus.publish("samples.r", b"1", message_id="a")
    clock.now += DUPLICATE_WINDOW_S
    await bus.publish("samples.r", b"1", message_id="a")
    assert (await bus.stream_info("SAMPLES")).messages == 1
    clock.now += 1
    await bus.publish("samples.r", b"1", message_id="a")
    assert (await bus.stream_info("SAMPLES")).messages == 2


async def test_histories_are_bounded_per_subject_and_by_age(bus: MemoryBus, clock: Clock) -> None:
    bound = STREAMS["STEPS"].max_messages_per_subject
    for number in range(bound + 5):
        await bus.publish("steps.r.1.0", str(number).encode())
    await bus.publish("steps.r.1.1", b"other")
    assert (await bus.stream_info("STEPS")).messages == bound + 1
    assert await anext(bus.follow("steps.r.1.0")) == b"5"
    clock.now += STREAMS["STEPS"].max_age_s + 1
    await bus.publish("steps.r.2.0", b"new")
    assert (await bus.stream_info("STEPS")).messages == 1


async def test_buses_of_one_name_share_messages_and_other_names_do_not() -> None:
    first, second, other = open_bus("memory://shared"), open_bus("memory://shared"), open_bus("memory://other")
    await first.publish("samples.r", b"1")
    assert (await second.stream_info("SAMPLES")).messages == 1
    assert (await other.stream_info("SAMPLES")).messages == 0
