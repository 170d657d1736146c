"""Following a subject of a limits stream: in order, without duplicates or gaps, over reconnects and lost streams."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import nats.errors
import nats.js.errors
import structlog
from nats.js import api

from specfleet.bus.connection import TRANSIENT, closed_error
from specfleet.bus.pull import Outcome, Puller

if TYPE_CHECKING:
    from specfleet.bus.jetstream import JetStreamBus

log = structlog.get_logger()

_BATCH = 64
# A request that waits in vain is renewed this often; a server that vanished silently is noticed this late.
_WAIT_S = 20.0
_ANSWER_GRACE_S = 5.0
# The server forgets the reader of a process that died.
_INACTIVE_S = 120.0


async def follow_stream(bus: "JetStreamBus", stream: str, subject: str, from_start: bool) -> AsyncIterator[bytes]:
    """Yields messages for ever. Without from_start it begins after the newest message at the first iteration."""
    follower = _Follower(bus, stream, subject, await bus.open_puller())
    try:
        await follower.start(from_start)
        while True:
            async for data in follower.read():
                yield data
            await follower.resume()
    finally:
        await bus.close_puller(follower.puller)


class _Follower:
    """An ephemeral consumer that is made again, one message further, whenever something is not as it should be."""

    def __init__(self, bus: "JetStreamBus", stream: str, subject: str, puller: Puller) -> None:
        self._bus = bus
        self._stream = stream
        self._subject = subject
        self.puller = puller
        # Sequence number (of the stream) of the next message wanted, and the identity of the stream it counts in.
        self._next_sequence = 1
        self._created: object = None
        self._consumer = ""

    async def start(self, from_start: bool) -> None:
        info = await self._bus.raw_stream_info(self._stream)
        self._created = info.created
        self._next_sequence = 1 if from_start else info.state.last_seq + 1
        await self.resume()

    async def resume(self) -> None:
        """A fresh consumer at the next wanted message; at the first one when the stream itself is a new one."""
        pause_s = 0.05
        while True:
            info = await self._bus.raw_stream_info(self._stream)
            if info.created != self._created:
                log.warning("stream was lost and created again; following it from its start", stream=self._stream)
                self._created, self._next_sequence = info.created, 1
            name = f"follow-{secrets.token_hex(8)}"
            config = api.ConsumerConfig(
                name=name,
                filter_subject=self._subject,
                deliver_policy=api.DeliverPolicy.BY_START_SEQUENCE,
                opt_start_seq=self._next_sequence,
                ack_policy=api.AckPolicy.NONE,
                inactive_threshold=_INACTIVE_S,
                mem_storage=True,
                num_replicas=1,
            )
            try:
                await self._bus.jetstream.add_consumer(self._stream, config)
                self._consumer = name
                return
            except nats.errors.ConnectionClosedError as error:
                raise closed_error() from error
            except (*TRANSIENT, nats.js.errors.APIError) as error:
                log.info(
                    "cannot follow yet; trying again", subject=self._subject, error=f"{type(error).__name__}: {error}"
                )
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, 1.0)

    async def read(self) -> AsyncIterator[bytes]:
        """Yields messages until this consumer is of no use any more."""
        loop = asyncio.get_running_loop()
        consumer_sequence = 0
        while True:
            try:
                await self.puller.request(self._stream, self._consumer, _BATCH, _WAIT_S)
            except nats.errors.ConnectionClosedError as error:
                raise closed_error() from error
            except TRANSIENT:
                return
            deadline = loop.time() + _WAIT_S + _ANSWER_GRACE_S
            for _ in range(_BATCH):
                received = await self.puller.next(deadline)
                if received is Outcome.DONE:
                    break
                if isinstance(received, Outcome):
                    return
                meta = received.metadata
                if meta.consumer != self._consumer:
                    continue  # of a consumer that was given up; its successor delivers this message again
                consumer_sequence += 1
                if meta.sequence.consumer != consumer_sequence:
                    return
                self._next_sequence = meta.sequence.stream + 1
                yield received.data
