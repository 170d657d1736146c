"""/metrics, /healthz and /readyz of a service: three GET endpoints on asyncio streams, no web framework."""

import asyncio
import errno
from collections.abc import Callable
from http import HTTPStatus

import structlog
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from specfleet.contracts.errors import HostError
from specfleet.rpc.address import listen_address

log = structlog.get_logger()

# A scraper sends a few hundred bytes within milliseconds; whatever is larger or slower is not one.
_MAX_HEAD_BYTES = 16 * 1024
_READ_TIMEOUT_S = 5.0
_TEXT = "text/plain; charset=utf-8"

Readiness = Callable[[], tuple[bool, str]]


class TelemetryServer:
    """Serves the default Prometheus registry and the health of this process.

    /healthz answers 200 as long as the event loop turns; /readyz asks `ready` and answers 200 or 503 with its reason.
    """

    def __init__(self, listen: str, ready: Readiness, *, insecure: bool = False) -> None:
        self._address = listen_address(listen, insecure=insecure)
        self._ready = ready
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self) -> int:
        """Returns the port. Raises HostError SF-HOST-PORT-IN-USE or SF-HOST-LISTEN, naming the address."""
        try:
            self._server = await asyncio.start_server(
                self._serve, self._address.host, self._address.port, limit=_MAX_HEAD_BYTES
            )
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise HostError(
                    "SF-HOST-PORT-IN-USE",
                    f"{self._address} is in use by another process; stop it, or pass another --metrics address",
                ) from error
            raise HostError("SF-HOST-LISTEN", f"cannot listen on {self._address}: {error.strerror or error}") from error
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def stop(self) -> None:
        if self._server is None:
            return
        self._server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        await self._server.wait_closed()
        self._server = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            async with asyncio.timeout(_READ_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
            writer.write(self._answer(head))
            await writer.drain()
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
            pass
        except asyncio.CancelledError:
            # Only stop() cancels these tasks; ended normally, asyncio.streams does not report them as failed.
            pass
        finally:
            writer.close()
            self._connections.discard(task)

    def _answer(self, head: bytes) -> bytes:
        parts = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
        if len(parts) != 3 or not parts[2].startswith("HTTP/"):
            return _response(HTTPStatus.BAD_REQUEST, _TEXT, b"not an HTTP request\n")
        method, path = parts[0], parts[1].split("?", 1)[0]
        if method not in ("GET", "HEAD"):
            return _response(HTTPStatus.METHOD_NOT_ALLOWED, _TEXT, b"only GET\n")
        status, kind, body = self._route(path)
        return _response(status, kind, body, head_only=method == "HEAD")

    def _route(self, path: str) -> tuple[HTTPStatus, str, bytes]:
        match path:
            case "/metrics":
                return HTTPStatus.OK, CONTENT_TYPE_LATEST, generate_latest()
            case "/healthz":
                return HTTPStatus.OK, _TEXT, b"ok\n"
            case "/readyz":
                try:
                    ready, reason = self._ready()
                except Exception as error:
                    log.exception("readiness check failed")
                    ready, reason = False, f"readiness check failed: {error}"
                status = HTTPStatus.OK if ready else HTTPStatus.SERVICE_UNAVAILABLE
                return status, _TEXT, f"{reason or ('ready' if ready else 'not ready')}\n".encode()
            case _:
                return HTTPStatus.NOT_FOUND, _TEXT, b"known paths: /metrics /healthz /readyz\n"


def _response(status: HTTPStatus, kind: str, body: bytes, *, head_only: bool = False) -> bytes:
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode("latin-1") + (b"" if head_only else body)
