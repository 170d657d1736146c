"""The bus in one process, with JetStream's behaviour: work queues, acks, redelivery, duplicate window, limits."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from specfleet.bus.base import Bus, Message, StreamInfo, Subscription
from specfleet.bus.streams import (
    DUPLICATE_WINDOW_S,
    STREAMS,
    StreamSpec,
    check_follow,
    check_message,
    check_subscription,
    filters_overlap,
    stream_of,
    subject_matches,
)
from specfleet.contracts.errors import HostError

Clock = Callable[[], float]


@dataclass
class _Stored:
    sequence: int
    subject: str
    data: bytes
    at: float


@dataclass
class _Durable:
    filter: str
    max_ack_pending: int
    ack_wait_s: float
    # Sequence → when it is delivered again unless acked.
    pending: dict[int, float] = field(default_factory=dict)
    # Sequence → when a naked message may be delivered again.
    delayed: dict[int, float] = field(default_factory=dict)


@dataclass
class _Stream:
    spec: StreamSpec
    last_sequence: int = 0
    messages: dict[int, _Stored] = field(default_factory=dict)
    durables: dict[str, _Durable] = field(default_factory=dict)


class MemoryBroker:
    """What the buses of one name share: the server's part. One event loop; clock() in seconds, injectable for tests."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self.clock = clock
        self.streams = {name: _Stream(spec) for name, spec in STREAMS.items()}
        self._seen: dict[tuple[str, str], float] = {}
        self._seen_order: deque[tuple[float, tuple[str, str]]] = deque()
        self._changed = asyncio.Event()

    def notify(self) -> None:
        """Wakes everyone who waits; call it after moving an injected clock."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait(self, timeout_s: float | None) -> None:
        """Until something changed, or the time is over."""
        changed = self._changed
        try:
            async with asyncio.timeout(timeout_s):
                await changed.wait()
        except TimeoutError:
            return

    def store(self, spec: StreamSpec, subject: str, data: bytes, message_id: str) -> bool:
        """False when a work queue is full."""
        stream, now = self.streams[spec.name], self.clock()
        while self._seen_order and now - self._seen_order[0][0] > DUPLICATE_WINDOW_S:
            _, old = self._seen_order.popleft()
            del self._seen[old]
        key = (spec.name, message_id)
        if message_id and key in self._seen:
            return True
        if spec.work_queue and spec.max_messages and len(stream.messages) >= spec.max_messages:
            return False
        if message_id:
            self._seen[key] = now
            self._seen_order.append((now, key))
        stream.last_sequence += 1
        stream.messages[stream.last_sequence] = _Stored(stream.last_sequence, subject, data, now)
        self._trim(stream, subject)
        self.notify()
        return True

    def _trim(self, stream: _Stream, subject: str) -> None:
        spec, messages = stream.spec, stream.messages
        if spec.work_queue:
            return
        if spec.max_messages_per_subject:
            same = [m.sequence for m in messages.values() if m.subject == subject]
            for sequence in same[: -spec.max_messages_per_subject]:
                del messages[sequence]
        while messages and self._oldest_must_go(spec, messages):
            del messages[next(iter(messages))]

    def _oldest_must_go(self, spec: StreamSpec, messages: dict[int, _Stored]) -> bool:
        oldest = messages[next(iter(messages))]
        too_many = bool(spec.max_messages) and len(messages) > spec.max_messages
        return too_many or bool(spec.max_age_s and self.clock() - oldest.at > spec.max_age_s)

    def add_durable(self, stream: _Stream, name: str, wanted: _Durable) -> None:
        for other, durable in stream.durables.items():
            if other != name and filters_overlap(durable.filter, wanted.filter):
                raise HostError(
                    "SF-BUS-CONSUMER",
                    f"durable {name!r} with filter {wanted.filter!r} overlaps {other!r} with filter {durable.filter!r} "
                    f"on stream {stream.spec.name}; each subject of a work queue has one durable",
                )
        old = stream.durables.get(name)
        if old is not None:
            wanted.pending, wanted.delayed = old.pending, old.delayed
        stream.durables[name] = wanted

    def deliver(self, stream: _Stream, durable: _Durable, limit: int) -> list[_Stored]:
        """Up to limit messages that nobody holds, oldest first, never beyond max_ack_pending."""
        now = self.clock()
        for sequence in [s for s, deadline in durable.pending.items() if deadline <= now or s not in stream.messages]:
            del durable.pending[sequence]
        room = min(limit, durable.max_ack_pending - len(durable.pending))
        taken: list[_Stored] = []
        for message in stream.messages.values():
            if len(taken) >= room:
                break
            held = message.sequence in durable.pending or durable.delayed.get(message.sequence, now) > now
            if not held and subject_matches(durable.filter, message.subject):
                durable.pending[message.sequence] = now + durable.ack_wait_s
                durable.delayed.pop(message.sequence, None)
                taken.append(message)
        return taken

    def next_change(self, durable: _Durable) -> float | None:
        """Seconds until a held message becomes deliverable by itself; None when none will."""
        times = [*durable.pending.values(), *durable.delayed.values()]
        return max(0.0, min(times) - self.clock()) if times else None


_brokers: WeakValueDictionary[str, MemoryBroker] = WeakValueDictionary()


class MemoryBus(Bus):
    """`memory://NAME`: buses of one name in one process share their messages as long as one of them lives."""

    def __init__(self, name: str = "", *, broker: MemoryBroker | None = None) -> None:
        if broker is None:
            broker = _brokers.get(name) or MemoryBroker()
            _brokers[name] = broker
        self._broker = broker

    async def connect(self) -> None:
        return

    async def publish(self, subject: str, data: bytes, *, message_id: str = "") -> None:
        spec = check_message(subject, data, message_id)
        while not self._broker.store(spec, subject, data, message_id):
            await self._broker.wait(None)

    async def publish_many(self, messages: list[tuple[str, bytes, str]]) -> None:
        for subject, data, message_id in messages:
            check_message(subject, data, message_id)
        for subject, data, message_id in messages:
            await self.publish(subject, data, message_id=message_id)

    async def subscribe(
        self, subject: str, durable: str, *, max_ack_pending: int = 4096, ack_wait_s: float = 60.0
    ) -> Subscription:
        spec = check_subscription(subject, durable, max_ack_pending, ack_wait_s)
        stream = self._broker.streams[spec.name]
        self._broker.add_durable(stream, durable, _Durable(subject, max_ack_pending, ack_wait_s))
        return _MemorySubscription(self._broker, stream, durable)

    async def follow(self, subject: str, *, from_start: bool = True) -> AsyncIterator[bytes]:
        stream = self._broker.streams[check_follow(subject).name]
        seen = 0 if from_start else stream.last_sequence
        while True:
            fresh = [m for m in stream.messages.values() if m.sequence > seen]
            for message in fresh:
                seen = message.sequence
                if subject_matches(subject, message.subject):
                    yield message.data
            if next(reversed(stream.messages), 0) <= seen:
                await self._broker.wait(None)

    async def purge(self, subject: str) -> None:
        stream = self._broker.streams[stream_of(subject).name]
        for message in list(stream.messages.values()):
            if subject_matches(subject, message.subject):
                del stream.messages[message.sequence]
        self._broker.notify()

    async def stream_info(self, stream: str) -> StreamInfo:
        if stream not in STREAMS:
            raise ValueError(f"{stream!r} is not a stream; known: {', '.join(STREAMS)}")
        messages = self._broker.streams[stream].messages
        return StreamInfo(messages=len(messages), bytes=sum(len(m.data) for m in messages.values()))

    async def close(self) -> None:
        return


class _MemorySubscription(Subscription):
    def __init__(self, broker: MemoryBroker, stream: _Stream, durable: str) -> None:
        self._broker = broker
        self._stream = stream
        self._durable = durable
        self._closed = False

    async def fetch(self, max_messages: int, timeout_s: float) -> list[Message]:
        if max_messages < 1:
            raise ValueError(f"max_messages must be at least 1, not {max_messages}")
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while not self._closed:
            # Looked up each time: another subscriber may have changed the durable's settings.
            durable = self._stream.durables[self._durable]
            found = self._broker.deliver(self._stream, durable, max_messages)
            remaining_s = deadline - loop.time()
            if found or remaining_s <= 0:
                return [_MemoryMessage(self._broker, self._stream, self._durable, message) for message in found]
            change_s = self._broker.next_change(durable)
            await self._broker.wait(remaining_s if change_s is None else min(remaining_s, max(change_s, 0.001)))
        return []

    async def close(self) -> None:
        self._closed = True
        self._broker.notify()


class _MemoryMessage:
    def __init__(self, broker: MemoryBroker, stream: _Stream, durable: str, message: _Stored) -> None:
        self._broker = broker
        self._stream = stream
        self._durable = durable
        self._sequence = message.sequence
        self._ended = False
        self.data = message.data
        self.subject = message.subject

    async def ack(self) -> None:
        if self._ended:
            return
        self._ended = True
        self._stream.messages.pop(self._sequence, None)
        self._durable_state.pending.pop(self._sequence, None)
        self._broker.notify()

    async def nak(self, delay_s: float = 0.0) -> None:
        if self._ended:
            return
        self._ended = True
        state = self._durable_state
        if state.pending.pop(self._sequence, None) is not None and delay_s > 0:
            state.delayed[self._sequence] = self._broker.clock() + delay_s
        self._broker.notify()

    async def in_progress(self) -> None:
        state = self._durable_state
        if not self._ended and self._sequence in state.pending:
            state.pending[self._sequence] = self._broker.clock() + state.ack_wait_s

    @property
    def _durable_state(self) -> _Durable:
        return self._stream.durables[self._durable]
