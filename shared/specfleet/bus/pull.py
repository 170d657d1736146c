"""Pull requests to a JetStream consumer, on one inbox.

nats-py's own fetch holds messages for its whole time-out when max_ack_pending blocks the rest of a batch, and does not
notice that the server lost a waiting request. Here a request ends with its last message, with the server's status, or
when the connection was re-established.
"""

import asyncio
import json
from enum import Enum, auto

from nats.aio.client import Client
from nats.aio.msg import Msg


class Outcome(Enum):
    """How a pull request ended other than with a message."""

    TIMEOUT = auto()
    # The server has nothing more for this request (no messages, expired, max_ack_pending reached).
    DONE = auto()
    # The consumer or its stream does not exist (any more).
    GONE = auto()
    # The connection was re-established: the request is lost.
    RECONNECTED = auto()


class Puller:
    """Sends pull requests to one consumer and receives their messages, one request at a time."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._inbox = client.new_inbox()
        self._reply = ""
        self._count = 0
        self._queue: asyncio.Queue[Msg | None] = asyncio.Queue()

    async def open(self) -> None:
        self._subscription = await self._client.subscribe(f"{self._inbox}.*", cb=self._receive)

    async def close(self) -> None:
        if not self._client.is_closed:
            await self._subscription.unsubscribe()

    @property
    def closed(self) -> bool:
        return bool(self._client.is_closed)

    @property
    def connected(self) -> bool:
        return bool(self._client.is_connected)

    def wake(self) -> None:
        """The connection was re-established, or closed: whoever waits looks again."""
        self._queue.put_nowait(None)

    async def request(self, stream: str, consumer: str, batch: int, expires_s: float = 0.0) -> None:
        """Asks for up to batch messages: those there now; with expires_s > 0 also those that arrive within it."""
        self._count += 1
        self._reply = f"{self._inbox}.{self._count}"
        body: dict[str, int | bool] = {"batch": batch}
        if expires_s > 0:
            body["expires"] = int(expires_s * 1e9)
        else:
            body["no_wait"] = True
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}"
        await self._client.publish(subject, json.dumps(body).encode(), reply=self._reply)

    async def next(self, deadline: float) -> Msg | Outcome:
        """The next message of any request, or how the current request ended. deadline: loop time."""
        while True:
            try:
                async with asyncio.timeout_at(deadline):
                    message = await self._queue.get()
            except TimeoutError:
                return Outcome.TIMEOUT
            if message is None:
                return Outcome.RECONNECTED
            status = (message.headers or {}).get("Status")
            if status is None:
                return message
            # A late status of an earlier request says nothing about this one; 100 is a heartbeat.
            if message.subject == self._reply and status != "100":
                return _outcome(status, (message.headers or {}).get("Description", ""))

    def buffered(self) -> Msg | None:
        """A message that arrived after its request was given up on; None when there is none."""
        while not self._queue.empty():
            message = self._queue.get_nowait()
            if message is not None and "Status" not in (message.headers or {}):
                return message
        return None

    async def _receive(self, message: Msg) -> None:
        self._queue.put_nowait(message)


def _outcome(status: str, description: str) -> Outcome:
    # 503: nobody serves the consumer. 409 has many meanings; these two end the consumer.
    if status == "503" or (status == "409" and ("Deleted" in description or "Shutdown" in description)):
        return Outcome.GONE
    return Outcome.DONE
