"""The one interface to the message bus (docs/design.md §4). Backends: bus/jetstream.py, and in memory bus/memory.py."""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

# References only: anything larger is a tensor or a mistake. A longer prompt travels through the store.
MAX_MESSAGE_BYTES = 256 * 1024
# nats-server takes 1 MiB with headers and closes the connection of whoever sends more; the headers fit into 4 KiB.
MAX_PROMPT_BYTES = 1024 * 1024 - 4096


class Message(Protocol):
    """One delivered message. Exactly one of ack, nak and term ends it; in_progress extends its ack deadline."""

    data: bytes
    subject: str

    async def ack(self) -> None: ...
    async def nak(self, delay_s: float = 0.0) -> None: ...
    async def in_progress(self) -> None: ...


class Subscription(ABC):
    """A durable pull subscription on a work-queue stream."""

    @abstractmethod
    async def fetch(self, max_messages: int, timeout_s: float) -> list[Message]:
        """At most max_messages; an empty list when none arrived in time. Survives a restart of the server."""

    @abstractmethod
    async def close(self) -> None: ...


@dataclass(frozen=True)
class StreamInfo:
    messages: int
    bytes: int


class Bus(ABC):
    @abstractmethod
    async def connect(self) -> None:
        """Connects (retrying for ever with back-off) and creates or updates the streams of docs/design.md §4."""

    @abstractmethod
    async def publish(self, subject: str, data: bytes, *, message_id: str = "") -> None:
        """Publishes to the stream that owns the subject and returns once the server has stored it.

        Retries with the same message id until stored. Raises ValueError when data exceeds the subject's limit.
        """

    @abstractmethod
    async def publish_many(self, messages: list[tuple[str, bytes, str]]) -> None:
        """(subject, data, message_id) each; returns when all are stored. Pipelined."""

    @abstractmethod
    async def subscribe(
        self, subject: str, durable: str, *, max_ack_pending: int = 4096, ack_wait_s: float = 60.0
    ) -> Subscription:
        """A durable pull consumer filtered by subject (wildcards allowed) on a work-queue stream."""

    @abstractmethod
    def follow(self, subject: str, *, from_start: bool = True) -> AsyncIterator[bytes]:
        """Every message of a subject on a limits stream (STEPS, EVENTS), in order, resuming over reconnects."""

    @abstractmethod
    async def purge(self, subject: str) -> None:
        """Drops every message of the subject."""

    @abstractmethod
    async def stream_info(self, stream: str) -> StreamInfo: ...

    @abstractmethod
    async def close(self) -> None: ...
