"""kill -9 of a real nats-server, loss of its disk, foreign hands on its streams: nothing lost, nothing twice."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import nats
import pytest
from fixtures.net import NatsServer
from nats.js import api

from specfleet.bus.jetstream import JetStreamBus
from specfleet.bus.streams import DUPLICATE_WINDOW_S
from specfleet.contracts.errors import HostError, UnreachableError

pytestmark = pytest.mark.integration


@pytest.fixture
async def bus(nats_server: NatsServer) -> AsyncIterator[JetStreamBus]:
    bus = JetStreamBus(nats_server.url)
    await bus.connect()
    yield bus
    await bus.close()


async def drain(subscription: Any) -> list[bytes]:
    """Everything a subscription still delivers, acked."""
    got: list[bytes] = []
    while messages := await subscription.fetch(256, 0.3):
        got += [message.data for message in messages]
        for message in messages:
            await message.ack()
    return got


async def test_kill_while_publishing_loses_nothing_and_doubles_nothing(
    nats_server: NatsServer, bus: JetStreamBus
) -> None:
    wanted = [str(n).encode() for n in range(6000)]
    publishing = asyncio.create_task(bus.publish_many([("samples.r", data, f"id-{data.decode()}") for data in wanted]))
    kills = 0
    while not publishing.done() and kills < 3:
        await asyncio.wait([publishing], timeout=0.08)
        if not publishing.done():
            nats_server.kill()
            nats_server.start()
            kills += 1
    await asyncio.wait_for(publishing, 30)
    assert kills >= 1
    got = await drain(await bus.subscribe("samples.*", "coordinator"))
    assert Counter(got) == Counter(wanted)


async def test_publish_waits_for_a_dead_server(nats_server: NatsServer, bus: JetStreamBus) -> None:
    nats_server.kill()
    publishing = asyncio.create_task(bus.publish("samples.r", b"1", message_id="a"))
    done, _ = await asyncio.wait([publishing], timeout=0.3)
    assert not done
    nats_server.start()
    await asyncio.wait_for(publishing, 5)
    assert (await bus.stream_info("SAMPLES")).messages == 1


async def test_connect_waits_for_a_server_that_starts_later(nats_server: NatsServer) -> None:
    nats_server.stop()
    bus = JetStreamBus(nats_server.url)
    connecting = asyncio.create_task(bus.connect())
    done, _ = await asyncio.wait([connecting], timeout=0.3)
    assert not done
    nats_server.start()
    await asyncio.wait_for(connecting, 5)
    await bus.close()


async def test_a_waiting_fetch_survives_a_restart(nats_server: NatsServer, bus: JetStreamBus) -> None:
    subscription = await bus.subscribe("samples.*", "coordinator", ack_wait_s=1)
    await bus.publish("samples.r", b"before")
    await subscription.fetch(1, 1)  # taken, never acked
    waiting = asyncio.create_task(subscription.fetch(10, 20))
    await asyncio.wait([waiting], timeout=0.05)
    nats_server.kill()
    nats_server.start()
    await bus.publish("samples.r", b"after")
    async with asyncio.timeout(5):
        got = [message.data for message in await waiting]
        while set(got) != {b"before", b"after"}:
            got += [message.data for message in await subscription.fetch(10, 3)]


async def test_a_fetch_during_an_outage_returns_empty_in_time(nats_server: NatsServer, bus: JetStreamBus) -> None:
    subscription = await bus.subscribe("samples.*", "coordinator")
    nats_server.kill()
    async with asyncio.timeout(3):
        assert await subscription.fetch(10, 0.5) == []


async def test_the_loss_of_the_whole_disk_is_survived(nats_server: NatsServer, bus: JetStreamBus) -> None:
    subscription = await bus.subscribe("samples.*", "coordinator")
    (held,) = await _publish_and_fetch(bus, subscription, b"before")
    waiting = asyncio.create_task(subscription.fetch(10, 20))
    await asyncio.wait([waiting], timeout=0.05)
    nats_server.kill()
    nats_server.wipe()
    nats_server.start()
    await asyncio.wait_for(bus.publish("samples.r", b"after", message_id="x"), 5)
    (message,) = await asyncio.wait_for(waiting, 5)
    assert message.data == b"after"
    await held.ack()  # of a message that no longer exists
    await message.ack()
    assert await drain(subscription) == []


async def _publish_and_fetch(bus: JetStreamBus, subscription: Any, data: bytes) -> list[Any]:
    await bus.publish("samples.r", data)
    messages: list[Any] = await subscription.fetch(1, 2)
    return messages


async def test_deleted_streams_and_consumers_are_made_again(nats_server: NatsServer, bus: JetStreamBus) -> None:
    subscription = await bus.subscribe("samples.*", "coordinator")
    waiting = asyncio.create_task(subscription.fetch(1, 20))
    await asyncio.wait([waiting], timeout=0.05)
    await bus.jetstream.delete_consumer("SAMPLES", "coordinator")
    await bus.publish("samples.r", b"1")
    (message,) = await asyncio.wait_for(waiting, 5)
    await message.ack()
    await bus.jetstream.delete_stream("SAMPLES")
    await asyncio.wait_for(bus.publish("samples.r", b"2"), 5)
    (message,) = await asyncio.wait_for(subscription.fetch(1, 5), 6)
    assert message.data == b"2"
    await bus.jetstream.delete_stream("SAMPLES")
    assert (await bus.stream_info("SAMPLES")).messages == 0
    await bus.jetstream.delete_stream("SAMPLES")
    await bus.purge("samples.r")


async def test_follow_has_no_gap_and_no_duplicate_over_restarts(nats_server: NatsServer, bus: JetStreamBus) -> None:
    got: list[bytes] = []

    async def follow() -> None:
        async with aclosing(bus.follow("steps.r.1.0")) as steps:  # type: ignore[type-var]
            async for data in steps:
                got.append(data)
                if len(got) == 900:
                    return

    following = asyncio.create_task(follow())
    for life in range(3):
        messages = [("steps.r.1.0", str(n).encode(), f"s{n}") for n in range(life * 300, life * 300 + 300)]
        publishing = asyncio.create_task(bus.publish_many(messages))
        await asyncio.wait([publishing], timeout=0.01)
        nats_server.kill()
        nats_server.start()
        await asyncio.wait_for(publishing, 20)
    await asyncio.wait_for(following, 10)
    # Retried publishes may change places while a server is down; the follower shows what the stream holds, each once.
    assert Counter(got) == Counter(str(n).encode() for n in range(900))


async def test_follow_starts_over_on_a_new_stream(nats_server: NatsServer, bus: JetStreamBus) -> None:
    async with aclosing(bus.follow("steps.r.1.0")) as steps:  # type: ignore[type-var]
        await bus.publish_many([("steps.r.1.0", str(n).encode(), "") for n in range(10)])
        async with asyncio.timeout(5):
            assert [await anext(steps) for _ in range(10)] == [str(n).encode() for n in range(10)]
        nats_server.kill()
        nats_server.wipe()
        nats_server.start()
        await bus.publish_many([("steps.r.1.0", f"new{n}".encode(), "") for n in range(20)])
        async with asyncio.timeout(5):
            assert [await anext(steps) for _ in range(20)] == [f"new{n}".encode() for n in range(20)]


async def test_subscribe_changes_an_existing_durable(bus: JetStreamBus) -> None:
    await bus.subscribe("samples.*", "coordinator", ack_wait_s=30, max_ack_pending=10)
    await bus.subscribe("samples.r", "coordinator", ack_wait_s=60, max_ack_pending=20)
    config = (await bus.jetstream.consumer_info("SAMPLES", "coordinator")).config
    assert (config.filter_subject, config.ack_wait, config.max_ack_pending) == ("samples.r", 60, 20)
    assert (config.max_deliver, config.ack_policy) == (-1, api.AckPolicy.EXPLICIT)


async def test_streams_have_the_settings_of_the_design(bus: JetStreamBus) -> None:
    for name in ("PROMPTS", "SAMPLES", "RELEASES"):
        config = (await bus.jetstream.stream_info(name)).config
        assert (config.retention, config.storage, config.discard) == ("workqueue", "file", "new")
        assert config.duplicate_window == DUPLICATE_WINDOW_S
    steps = (await bus.jetstream.stream_info("STEPS")).config
    assert (steps.retention, steps.max_msgs_per_subject) == ("limits", 1024)
    events = (await bus.jetstream.stream_info("EVENTS")).config
    assert (events.retention, events.max_age, events.subjects) == ("limits", 7 * 24 * 3600, ["events.>"])


async def test_connect_updates_a_stream_and_keeps_what_it_does_not_manage(nats_server: NatsServer) -> None:
    client = await nats.connect(nats_server.url)
    await client.jetstream().add_stream(
        name="STEPS", subjects=["steps.*.*.*"], storage="file", max_age=60, description="an operator's note"
    )
    bus = JetStreamBus(nats_server.url)
    await bus.connect()
    config = (await client.jetstream().stream_info("STEPS")).config
    assert (config.max_age, config.description) == (7 * 24 * 3600, "an operator's note")
    await bus.close()
    await client.close()


async def test_a_stream_that_cannot_become_ours_is_a_host_error(nats_server: NatsServer) -> None:
    client = await nats.connect(nats_server.url)
    await client.jetstream().add_stream(name="SAMPLES", subjects=["samples.*"], storage="memory")
    bus = JetStreamBus(nats_server.url)
    with pytest.raises(HostError, match="storage") as caught:
        await bus.connect()
    assert caught.value.code == "SF-BUS-STREAM"
    await bus.close()
    await client.close()


async def test_using_a_closed_bus_is_an_error_not_a_wait(nats_server: NatsServer) -> None:
    bus = JetStreamBus(nats_server.url)
    await bus.connect()
    subscription = await bus.subscribe("samples.*", "coordinator")
    waiting = asyncio.create_task(subscription.fetch(1, 60))
    await asyncio.wait([waiting], timeout=0.05)
    await bus.close()
    async with asyncio.timeout(5):
        for action in (waiting, bus.publish("samples.r", b""), subscription.fetch(1, 1), bus.purge("samples.r")):
            with pytest.raises(UnreachableError, match="closed"):
                await action
