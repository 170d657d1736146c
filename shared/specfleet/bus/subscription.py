"""A durable pull subscription on JetStream that outlives its server's restarts and losses."""

import asyncio
import time
from typing import TYPE_CHECKING

import nats.errors
import nats.js.errors
import structlog
from nats.aio.msg import Msg
from nats.js import api

from specfleet.bus.base import Message, Subscription
from specfleet.bus.connection import TRANSIENT, closed_error
from specfleet.bus.pull import Outcome, Puller
from specfleet.contracts.errors import HostError

if TYPE_CHECKING:
    from specfleet.bus.jetstream import JetStreamBus

log = structlog.get_logger()

# The server answers a request without waiting time at once; and one with a waiting time when that is over.
_ANSWER_GRACE_S = 0.5
# Other holders of the durable may have used up max_ack_pending; then the rest of a burst never comes.
_BURST_S = 0.1


class JetStreamMessage:
    """One delivered message. Acks are sent without waiting for an answer: a lost one means a redelivery."""

    def __init__(self, message: Msg, held: "Held") -> None:
        self._message = message
        self._held = held
        self._ended = False
        self.data: bytes = message.data
        self.subject: str = message.subject

    async def ack(self) -> None:
        await self._end(b"+ACK")

    async def nak(self, delay_s: float = 0.0) -> None:
        await self._end(b"-NAK" if delay_s <= 0 else b'-NAK {"delay": %d}' % int(delay_s * 1e9))

    async def in_progress(self) -> None:
        if not self._ended:
            self._held.renew(self)
            await self._send(b"+WPI")

    async def _end(self, verdict: bytes) -> None:
        if self._ended:
            return
        self._ended = True
        self._held.remove(self)
        await self._send(verdict)

    async def _send(self, body: bytes) -> None:
        try:
            await self._message._client.publish(self._message.reply, body)
        except nats.errors.Error as error:
            # The connection is closed, or down with a full buffer. The message is delivered again after its ack_wait.
            log.debug("ack not sent; the message will be redelivered", subject=self.subject, error=str(error))


class Held:
    """Messages of one subscription that are neither ended nor past their ack_wait."""

    def __init__(self, ack_wait_s: float) -> None:
        self._ack_wait_s = ack_wait_s
        self._until: dict[JetStreamMessage, float] = {}

    def __len__(self) -> int:
        now = time.monotonic()
        for message in [message for message, until in self._until.items() if until <= now]:
            del self._until[message]
        return len(self._until)

    def renew(self, message: JetStreamMessage) -> None:
        self._until[message] = time.monotonic() + self._ack_wait_s

    def remove(self, message: JetStreamMessage) -> None:
        self._until.pop(message, None)


class PullSubscription(Subscription):
    """One fetch at a time; several subscriptions, in one process or many, may share a durable."""

    def __init__(self, bus: "JetStreamBus", stream: str, config: api.ConsumerConfig, puller: Puller) -> None:
        assert config.durable_name is not None
        assert config.ack_wait is not None
        assert config.max_ack_pending is not None
        self._bus = bus
        self._stream = stream
        self._config = config
        self._durable = config.durable_name
        self._puller = puller
        self._held = Held(config.ack_wait)
        self._max_held = config.max_ack_pending
        self._closed = False

    async def fetch(self, max_messages: int, timeout_s: float) -> list[Message]:
        if max_messages < 1:
            raise ValueError(f"max_messages must be at least 1, not {max_messages}")
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        taken: list[Message] = []
        while len(taken) < max_messages and (late := self._puller.buffered()) is not None:
            taken.append(self._hold(late))
        while not self._closed:
            if self._puller.closed:
                raise closed_error()
            if not taken and not self._puller.connected:
                # A request sent now would only pile up with others until the connection is back.
                if await self._puller.next(deadline) is Outcome.TIMEOUT:
                    break
                continue
            outcome = await self._take(taken, max_messages, 0.0)
            if not taken and outcome is Outcome.DONE and loop.time() < deadline:
                # Nothing is there: wait for one message, then take what came with it.
                outcome = await self._take(taken, 1, deadline - loop.time())
                if taken:
                    await self._take(taken, max_messages, 0.0)
            if taken or loop.time() >= deadline:
                break
            if outcome in (Outcome.GONE, Outcome.RECONNECTED) and not self._closed:
                await self._restore_until(deadline)
        return taken

    def _hold(self, message: Msg) -> JetStreamMessage:
        held = JetStreamMessage(message, self._held)
        self._held.renew(held)
        return held

    async def _take(self, taken: list[Message], limit: int, wait_s: float) -> Outcome:
        """One pull request: up to limit messages in all; waits up to wait_s for them."""
        # The server answers a request that max_ack_pending cuts short neither with more messages nor with a status.
        batch = min(limit - len(taken), self._max_held - len(self._held))
        if batch <= 0 and wait_s > 0:
            batch = 1  # waits at the server until an ack, or an expired ack_wait, makes room
        if batch <= 0:
            return Outcome.DONE
        try:
            await self._puller.request(self._stream, self._durable, batch, wait_s)
        except nats.errors.ConnectionClosedError as error:
            raise closed_error() from error
        except TRANSIENT:
            return Outcome.TIMEOUT
        deadline = asyncio.get_running_loop().time() + wait_s + _ANSWER_GRACE_S
        for _ in range(batch):
            received = await self._puller.next(deadline)
            if isinstance(received, Outcome):
                return received
            taken.append(self._hold(received))
            # Messages of one request come in one burst.
            deadline = asyncio.get_running_loop().time() + _BURST_S
        return Outcome.DONE

    async def _restore_until(self, deadline: float) -> None:
        try:
            async with asyncio.timeout_at(deadline):
                await self.restore()
        except TimeoutError:
            return

    async def restore(self) -> None:
        """Creates the durable or changes it to what was asked for, and creates lost streams. Retries until done."""
        pause_s = 0.05
        while True:
            try:
                await self._bus.jetstream.add_consumer(self._stream, self._config)
                return
            except nats.js.errors.BadRequestError as error:
                raise HostError(
                    "SF-BUS-CONSUMER",
                    f"durable {self._durable!r} with filter {self._config.filter_subject!r} cannot be created on "
                    f"stream {self._stream}: {error.description}; each subject of a work queue has one durable",
                ) from error
            except nats.errors.ConnectionClosedError as error:
                raise closed_error() from error
            except nats.js.errors.NotFoundError:
                await self._bus.ensure_streams()
            except TRANSIENT as error:
                log.info(
                    "durable not ready; trying again", durable=self._durable, error=f"{type(error).__name__}: {error}"
                )
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, 1.0)

    async def close(self) -> None:
        self._closed = True
        self._puller.wake()
        await self._bus.close_puller(self._puller)
