"""The bus on NATS JetStream. Survives restarts of the server, and the loss of everything it stored."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from typing import Any

import nats.errors
import nats.js.errors
import structlog
from nats.js import JetStreamContext, api

from specfleet.bus.base import Bus, StreamInfo, Subscription
from specfleet.bus.connection import TRANSIENT, Connection, closed_error, parse_servers
from specfleet.bus.follow import follow_stream
from specfleet.bus.pull import Puller
from specfleet.bus.replies import Replies
from specfleet.bus.streams import (
    DUPLICATE_WINDOW_S,
    STREAMS,
    StreamSpec,
    check_follow,
    check_message,
    check_subscription,
    stream_of,
)
from specfleet.bus.subscription import PullSubscription
from specfleet.contracts.errors import HostError

log = structlog.get_logger()

# Longer than any healthy answer. The message id makes sending again harmless.
REQUEST_TIMEOUT_S = 2.0
# Requests in flight of one publish_many: 64 saturate one server on two cores; bytes stay below the client's buffer.
_WINDOW_MESSAGES = 128
_WINDOW_BYTES = 4 * 1024 * 1024


class JetStreamBus(Bus):
    """`nats://HOST:PORT[,HOST:PORT…][?replicas=N]`. One instance per process and event loop."""

    def __init__(self, url: str) -> None:
        servers, self._replicas = parse_servers(url)
        self._connection = Connection(servers, self._interrupt_waiting)
        self._jetstream: JetStreamContext = self._connection.client.jetstream(timeout=REQUEST_TIMEOUT_S)
        self._replies = Replies(self._connection.client)
        self._pullers: set[Puller] = set()
        self._ensuring = asyncio.Lock()
        self._ensured_at = -1.0

    @property
    def jetstream(self) -> JetStreamContext:
        return self._jetstream

    async def connect(self) -> None:
        await self._connection.open()
        await self._replies.open()
        await self.ensure_streams()

    async def publish(self, subject: str, data: bytes, *, message_id: str = "") -> None:
        check_message(subject, data, message_id)
        # Sent again after a lost answer, a message without an id of its own would be stored twice.
        await self._store(subject, data, message_id or secrets.token_hex(12))

    async def publish_many(self, messages: list[tuple[str, bytes, str]]) -> None:
        for subject, data, message_id in messages:
            check_message(subject, data, message_id)
        for window in _windows(messages):
            await asyncio.gather(
                *(self._store(subject, data, id_ or secrets.token_hex(12)) for subject, data, id_ in window)
            )

    async def _store(self, subject: str, data: bytes, message_id: str) -> None:
        for pause_s in pauses():
            try:
                await self._replies.store(subject, data, message_id, REQUEST_TIMEOUT_S)
                return
            except nats.js.errors.NoStreamResponseError:
                # Nobody listens on the subject: the server lost its streams, or JetStream is not up yet.
                await self.ensure_streams()
            except nats.errors.ConnectionClosedError as error:
                raise closed_error() from error
            except nats.js.errors.BadRequestError as error:
                raise HostError(
                    "SF-BUS-REFUSED", f"the server refuses a message to {subject!r}: {error.description}"
                ) from error
            except (*TRANSIENT, nats.js.errors.APIError) as error:
                log.info(
                    "message not stored yet; trying again", subject=subject, message_id=message_id, error=str(error)
                )
            await asyncio.sleep(pause_s)

    async def subscribe(
        self, subject: str, durable: str, *, max_ack_pending: int = 4096, ack_wait_s: float = 60.0
    ) -> Subscription:
        spec = check_subscription(subject, durable, max_ack_pending, ack_wait_s)
        config = api.ConsumerConfig(
            durable_name=durable,
            filter_subject=subject,
            deliver_policy=api.DeliverPolicy.ALL,
            ack_policy=api.AckPolicy.EXPLICIT,
            ack_wait=ack_wait_s,
            # Redelivery is never the retry budget; the ledger counts.
            max_deliver=-1,
            max_ack_pending=max_ack_pending,
        )
        subscription = PullSubscription(self, spec.name, config, await self.open_puller())
        await subscription.restore()
        return subscription

    def follow(self, subject: str, *, from_start: bool = True) -> AsyncIterator[bytes]:
        return follow_stream(self, check_follow(subject).name, subject, from_start)

    async def purge(self, subject: str) -> None:
        stream = stream_of(subject).name
        for pause_s in pauses():
            try:
                await self._jetstream.purge_stream(stream, subject=subject)
                return
            except nats.errors.ConnectionClosedError as error:
                raise closed_error() from error
            except TRANSIENT as error:
                log.info("purge not done yet; trying again", subject=subject, error=str(error))
                await self.ensure_streams()
            await asyncio.sleep(pause_s)

    async def stream_info(self, stream: str) -> StreamInfo:
        if stream not in STREAMS:
            raise ValueError(f"{stream!r} is not a stream; known: {', '.join(STREAMS)}")
        state = (await self.raw_stream_info(stream)).state
        return StreamInfo(messages=state.messages, bytes=state.bytes)

    async def raw_stream_info(self, stream: str) -> api.StreamInfo:
        """The server's view of a stream, once it can be had; a lost stream is created again."""
        for pause_s in pauses():
            try:
                return await self._jetstream.stream_info(stream)
            except nats.errors.ConnectionClosedError as error:
                raise closed_error() from error
            except TRANSIENT:
                await self.ensure_streams()
            await asyncio.sleep(pause_s)
        raise AssertionError("the pauses never end")

    async def close(self) -> None:
        await self._connection.close()
        # Whoever still waits learns that nothing will come.
        self._interrupt_waiting()

    async def ensure_streams(self) -> None:
        """Creates or updates every stream, retrying until the server answers. Callers share one round of requests."""
        asked_at = time.monotonic()
        async with self._ensuring:
            if self._ensured_at > asked_at:
                return
            for pause_s in pauses():
                started = time.monotonic()
                try:
                    for spec in STREAMS.values():
                        await self._ensure_stream(stream_config(spec, self._replicas))
                    self._ensured_at = started
                    return
                except nats.errors.ConnectionClosedError as error:
                    raise closed_error() from error
                except TRANSIENT as error:
                    log.info("streams not ready; trying again", error=f"{type(error).__name__}: {error}")
                await asyncio.sleep(pause_s)

    async def _ensure_stream(self, wanted: api.StreamConfig) -> None:
        assert wanted.name is not None
        try:
            existing = (await self._jetstream.stream_info(wanted.name)).config
        except nats.js.errors.NotFoundError:
            await self._jetstream.add_stream(wanted)
            log.info("stream created", stream=wanted.name)
            return
        differing = {key: value for key, value in managed(wanted).items() if managed(existing)[key] != value}
        if not differing:
            return
        try:
            await self._jetstream.update_stream(existing.evolve(**differing))
        except (nats.js.errors.BadRequestError, nats.js.errors.ServerError) as error:
            raise HostError(
                "SF-BUS-STREAM",
                f"stream {wanted.name} exists with other settings that cannot be changed ({', '.join(differing)}): "
                f"{error.description}. Delete the stream, or use another NATS server",
            ) from error
        log.info("stream updated", stream=wanted.name, changed=sorted(differing))

    async def open_puller(self) -> Puller:
        puller = Puller(self._connection.client)
        await puller.open()
        self._pullers.add(puller)
        return puller

    async def close_puller(self, puller: Puller) -> None:
        self._pullers.discard(puller)
        with suppress(nats.errors.Error):
            await puller.close()

    def _interrupt_waiting(self) -> None:
        self._replies.interrupt()
        for puller in self._pullers:
            puller.wake()


def stream_config(spec: StreamSpec, replicas: int) -> api.StreamConfig:
    return api.StreamConfig(
        name=spec.name,
        subjects=[spec.subjects],
        retention=api.RetentionPolicy.WORK_QUEUE if spec.work_queue else api.RetentionPolicy.LIMITS,
        storage=api.StorageType.FILE,
        # A full queue refuses, so that its publisher waits; a full history drops its oldest.
        discard=api.DiscardPolicy.NEW if spec.work_queue else api.DiscardPolicy.OLD,
        max_msgs=spec.max_messages or -1,
        max_msgs_per_subject=spec.max_messages_per_subject or -1,
        max_age=spec.max_age_s,
        duplicate_window=DUPLICATE_WINDOW_S,
        num_replicas=replicas,
    )


def managed(config: api.StreamConfig) -> dict[str, Any]:
    """The settings this bus decides; whatever else an operator has set on a stream stays."""
    return {
        "subjects": config.subjects,
        "retention": config.retention,
        "storage": config.storage,
        "discard": config.discard,
        "max_msgs": config.max_msgs,
        "max_msgs_per_subject": config.max_msgs_per_subject,
        "max_age": config.max_age,
        "duplicate_window": config.duplicate_window,
        "num_replicas": config.num_replicas,
    }


def pauses() -> Iterator[float]:
    """Back-off between tries: 50 ms doubling to 1 s, for ever."""
    pause_s = 0.05
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, 1.0)


def _windows(messages: list[tuple[str, bytes, str]]) -> Iterator[list[tuple[str, bytes, str]]]:
    window: list[tuple[str, bytes, str]] = []
    num_bytes = 0
    for message in messages:
        if window and (len(window) == _WINDOW_MESSAGES or num_bytes + len(message[1]) > _WINDOW_BYTES):
            yield window
            window, num_bytes = [], 0
        window.append(message)
        num_bytes += len(message[1])
    if window:
        yield window
