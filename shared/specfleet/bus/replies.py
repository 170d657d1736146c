"""Publishing with acknowledgement: many messages in flight on one inbox, none of them waiting for a dead server."""

import asyncio
import json

import nats.js.errors
from nats.aio.client import Client
from nats.aio.msg import Msg


class InterruptedByReconnect(ConnectionError):
    """The connection was re-established: the answer to a message sent before will not come. Send it again."""


class Replies:
    """Sends messages and matches the server's acknowledgements to them.

    Unlike nats-py's request, whatever waits when the server dies is told as soon as the connection is back, not after
    its time-out.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._prefix = ""
        self._count = 0
        self._waiting: dict[str, asyncio.Future[Msg | None]] = {}

    async def open(self) -> None:
        self._prefix = self._client.new_inbox()
        await self._client.subscribe(f"{self._prefix}.*", cb=self._receive)

    def interrupt(self) -> None:
        """The connection was re-established, or closed."""
        for future in self._waiting.values():
            if not future.done():
                future.set_result(None)

    async def store(self, subject: str, data: bytes, message_id: str, timeout_s: float) -> None:
        """Returns once the stream has stored the message, or had stored it before under the same message id.

        Raises TimeoutError, InterruptedByReconnect, nats.errors.Error, NoStreamResponseError when no stream listens,
        and another nats.js APIError when the stream refuses.
        """
        self._count += 1
        reply = f"{self._prefix}.{self._count}"
        future: asyncio.Future[Msg | None] = asyncio.get_running_loop().create_future()
        self._waiting[reply] = future
        try:
            async with asyncio.timeout(timeout_s):
                await self._client.publish(subject, data, reply=reply, headers={"Nats-Msg-Id": message_id})
                answer = await future
        finally:
            del self._waiting[reply]
        if answer is None:
            raise InterruptedByReconnect("the connection was re-established before the server answered")
        if (answer.headers or {}).get("Status") == "503":
            raise nats.js.errors.NoStreamResponseError
        error = json.loads(answer.data).get("error")
        if error:
            nats.js.errors.APIError.from_error(error)

    async def _receive(self, message: Msg) -> None:
        future = self._waiting.get(message.subject)
        if future is not None and not future.done():
            future.set_result(message)
