"""One behaviour, two buses: every test runs against JetStream and against the in-memory twin."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest

from specfleet.bus.base import MAX_MESSAGE_BYTES, MAX_PROMPT_BYTES, Bus
from specfleet.bus.factory import open_bus
from specfleet.contracts.errors import HostError

pytestmark = pytest.mark.integration


@pytest.fixture(params=["jetstream", "memory"])
async def bus(request: pytest.FixtureRequest) -> AsyncIterator[Bus]:
    url = (
        request.getfixturevalue("nats_server").url
        if request.param == "jetstream"
        else f"memory://{request.node.name[:20]}"
    )
    bus = open_bus(url.split("[")[0])
    await bus.connect()
    yield bus
    await bus.close()


async def take(source: Any, count: int) -> list[bytes]:
    async with asyncio.timeout(10):
        return [await anext(source) for _ in range(count)]


async def test_published_messages_are_fetched_in_order_and_gone_after_ack(bus: Bus) -> None:
    await bus.publish_many([("samples.r", str(n).encode(), f"id-{n}") for n in range(300)])
    assert (await bus.stream_info("SAMPLES")).messages == 300
    subscription = await bus.subscribe("samples.*", "coordinator")
    got: list[bytes] = []
    while len(got) < 300:
        messages = await subscription.fetch(64, 5)
        assert 0 < len(messages) <= 64
        assert {message.subject for message in messages} == {"samples.r"}
        got += [message.data for message in messages]
        for message in messages:
            await message.ack()
    assert got == [str(n).encode() for n in range(300)]
    assert await subscription.fetch(64, 0.05) == []
    assert (await bus.stream_info("SAMPLES")).messages == 0


async def test_a_message_id_is_stored_once_even_after_it_was_acked(bus: Bus) -> None:
    subscription = await bus.subscribe("samples.*", "coordinator")
    await bus.publish("samples.r", b"1", message_id="r/e0000-p000000000/a1")
    await bus.publish("samples.r", b"1", message_id="r/e0000-p000000000/a1")
    await bus.publish_many([("samples.r", b"1", "r/e0000-p000000000/a1"), ("samples.r", b"2", "")])
    messages = await subscription.fetch(10, 1)
    assert [message.data for message in messages] == [b"1", b"2"]
    for message in messages:
        await message.ack()
    await bus.publish("samples.r", b"1", message_id="r/e0000-p000000000/a1")
    assert await subscription.fetch(10, 0.05) == []


async def test_fetch_returns_early_with_what_is_there_and_waits_for_what_is_not(bus: Bus) -> None:
    subscription = await bus.subscribe("samples.*", "coordinator")
    loop = asyncio.get_running_loop()
    began = loop.time()
    assert await subscription.fetch(10, 0.2) == []
    assert 0.15 < loop.time() - began < 2
    waiting = asyncio.create_task(subscription.fetch(10, 10))
    await asyncio.sleep(0)
    await bus.publish("samples.r", b"late")
    assert [message.data for message in await asyncio.wait_for(waiting, 5)] == [b"late"]


async def test_fetch_never_exceeds_what_may_be_pending(bus: Bus) -> None:
    subscription = await bus.subscribe("samples.*", "coordinator", max_ack_pending=3)
    await bus.publish_many([("samples.r", str(n).encode(), "") for n in range(5)])
    held = await subscription.fetch(10, 1)
    assert len(held) == 3
    assert await subscription.fetch(10, 0.05) == []
    waiting = asyncio.create_task(subscription.fetch(10, 10))
    await held[0].ack()
    # One ack makes room for one message.
    assert [message.data for message in await asyncio.wait_for(waiting, 5)] == [b"3"]


async def test_unacked_messages_come_again_and_acked_ones_do_not(bus: Bus) -> None:
    subscription = await bus.subscribe("samples.*", "coordinator", ack_wait_s=0.3)
    await bus.publish_many([("samples.r", name, "") for name in (b"acked", b"dropped")])
    first = await subscription.fetch(2, 1)
    await first[0].ack()
    again = await subscription.fetch(2, 5)
    assert [message.data for message in again] == [b"dropped"]
    await again[0].ack()
    await again[0].ack()  # a second ack is harmless
    await again[0].nak()
    assert await subscription.fetch(2, 0.5) == []


async def test_nak_returns_a_message_at_once_or_later(bus: Bus) -> None:
    subscription = await bus.subscribe("samples.*", "coordinator")
    await bus.publish("samples.r", b"1")
    await (await subscription.fetch(1, 1))[0].nak()
    (message,) = await subscription.fetch(1, 5)
    await message.nak(delay_s=0.3)
    assert await subscription.fetch(1, 0.05) == []
    assert len(await subscription.fetch(1, 5)) == 1


async def test_in_progress_keeps_a_message(bus: Bus) -> None:
    subscription = await bus.subscribe("samples.*", "coordinator", ack_wait_s=0.4)
    await bus.publish("samples.r", b"1")
    (message,) = await subscription.fetch(1, 1)
    for _ in range(3):
        assert await subscription.fetch(1, 0.2) == []
        await message.in_progress()
    await message.ack()
    assert await subscription.fetch(1, 0.6) == []


async def test_subscribers_of_a_durable_share_its_messages(bus: Bus) -> None:
    subscriptions = [await bus.subscribe("prompts.c.*", "capture-c") for _ in range(2)]
    await bus.publish_many([(f"prompts.c.run{n % 3}", str(n).encode(), "") for n in range(20)])
    await bus.publish("prompts.other.run0", b"not for them")
    got: list[bytes] = []
    while len(got) < 20:
        for subscription in subscriptions:
            for message in await subscription.fetch(3, 1):
                got.append(message.data)
                await message.ack()
    assert sorted(got) == sorted(str(n).encode() for n in range(20))
    assert (await bus.stream_info("PROMPTS")).messages == 1


async def test_a_subject_of_a_queue_has_one_durable(bus: Bus) -> None:
    await bus.subscribe("prompts.c.*", "first")
    await bus.subscribe("prompts.d.*", "second")
    with pytest.raises(HostError, match="one durable") as caught:
        await bus.subscribe("prompts.*.r", "third")
    assert caught.value.code == "SF-BUS-CONSUMER"


async def test_follow_gives_history_then_news(bus: Bus) -> None:
    for n in range(5):
        await bus.publish("steps.r.1.0", str(n).encode())
        await bus.publish("steps.r.1.1", b"another rank's")
    async with aclosing(bus.follow("steps.r.1.0")) as steps:  # type: ignore[type-var]
        assert await take(steps, 5) == [b"0", b"1", b"2", b"3", b"4"]
        waiting = asyncio.create_task(take(steps, 2))
        await bus.publish_many([("steps.r.1.0", b"5", ""), ("steps.r.1.1", b"x", ""), ("steps.r.1.0", b"6", "")])
        assert await waiting == [b"5", b"6"]


async def test_follow_may_begin_now(bus: Bus) -> None:
    await bus.publish("events.r.step", b"old")
    async with aclosing(bus.follow("events.r.>", from_start=False)) as events:  # type: ignore[type-var]
        waiting = asyncio.create_task(take(events, 1))
        # Published again and again until the follower is there: whatever it yields, it is never the old message.
        while not waiting.done():
            await bus.publish("events.r.step", b"new")
            await asyncio.wait([waiting], timeout=0.05)
        assert waiting.result() == [b"new"]


async def test_follow_of_a_long_history_is_complete(bus: Bus) -> None:
    await bus.publish_many([("steps.r.1.0", str(n).encode(), "") for n in range(1000)])
    async with aclosing(bus.follow("steps.r.1.0")) as steps:  # type: ignore[type-var]
        assert await take(steps, 1000) == [str(n).encode() for n in range(1000)]


async def test_purge_drops_one_subject_only(bus: Bus) -> None:
    await bus.publish_many([("prompts.c.a", b"1", ""), ("prompts.c.b", b"2", ""), ("prompts.d.a", b"3", "")])
    subscription = await bus.subscribe("prompts.c.*", "capture-c")
    held = await subscription.fetch(1, 1)
    await bus.purge("prompts.*.a")
    await held[0].ack()
    assert [message.data for message in await subscription.fetch(5, 1)] == [b"2"]
    assert (await bus.stream_info("PROMPTS")).messages == 1


async def test_the_largest_message_passes_and_a_larger_one_is_refused(bus: Bus) -> None:
    subscription = await bus.subscribe("prompts.c.*", "capture-c")
    # The longest message id leaves the least room under the server's limit.
    await bus.publish("prompts.c.r", bytes(MAX_PROMPT_BYTES), message_id="i" * 256)
    assert [len(message.data) for message in await subscription.fetch(1, 5)] == [MAX_PROMPT_BYTES]
    with pytest.raises(ValueError, match="exceeds"):
        await bus.publish("prompts.c.r", bytes(MAX_PROMPT_BYTES + 1))
    with pytest.raises(ValueError, match="exceeds"):
        await bus.publish_many([("samples.r", b"ok", ""), ("samples.r", bytes(MAX_MESSAGE_BYTES + 1), "")])
    # Checked before anything was sent.
    assert (await bus.stream_info("SAMPLES")).messages == 0


async def test_a_closed_subscription_ends_its_fetch(bus: Bus) -> None:
    subscription = await bus.subscribe("samples.*", "coordinator")
    waiting = asyncio.create_task(subscription.fetch(1, 60))
    await asyncio.wait([waiting], timeout=0.05)
    await subscription.close()
    assert await asyncio.wait_for(waiting, 5) == []


async def test_an_unknown_stream_is_refused(bus: Bus) -> None:
    with pytest.raises(ValueError, match="known: PROMPTS"):
        await bus.stream_info("NOPE")
