"""One NATS connection: connects for ever, tells what happens in log lines, knows which errors pass by themselves."""

import time
from collections.abc import Callable
from urllib.parse import urlsplit

import nats.errors
import nats.js.errors
import structlog
from nats.aio.client import Client

from specfleet.contracts.errors import ConfigError, UnreachableError

log = structlog.get_logger()

# nats-server restarts in under 30 ms; asking four times a second costs nothing and resumes work at once.
RECONNECT_WAIT_S = 0.25
_CONNECT_TIMEOUT_S = 2
# A dead peer that never closed its connection (host down) is noticed after two of these.
_PING_INTERVAL_S = 10
# What a client buffers while disconnected: acks and pull requests, and a few prompts.
_PENDING_BYTES = 8 * 1024 * 1024
_REPEAT_LOG_AFTER_S = 30.0

# Errors that a running server, or one that comes back, makes go away.
TRANSIENT = (
    TimeoutError,
    nats.errors.NoServersError,
    nats.errors.NoRespondersError,
    nats.errors.OutboundBufferLimitError,
    nats.errors.ConnectionReconnectingError,
    nats.errors.StaleConnectionError,
    nats.js.errors.NoStreamResponseError,
    nats.js.errors.ServiceUnavailableError,
    nats.js.errors.ServerError,
    nats.js.errors.NotFoundError,
    OSError,
)


def parse_servers(url: str) -> tuple[list[str], int]:
    """`nats://HOST:PORT[,HOST:PORT…][?replicas=N]` → (server URLs, replicas). Raises ConfigError SF-CONFIG-BUS-URL."""
    parts = urlsplit(url)
    hosts = [host for host in parts.netloc.split(",") if host]
    key, _, value = parts.query.partition("=")
    usable = parts.scheme in ("nats", "tls") and hosts and parts.path in ("", "/") and key in ("", "replicas")
    if not usable or (key and value not in ("1", "3", "5")):
        raise ConfigError(
            "SF-CONFIG-BUS-URL",
            f"{_redacted(url)!r} is not a bus URL; expected nats://HOST:PORT[,HOST:PORT…][?replicas=1|3|5] or memory://NAME",
        )
    return [f"{parts.scheme}://{host}" for host in hosts], int(value or 1)


def _redacted(url: str) -> str:
    credentials, at, rest = url.rpartition("@")
    return f"{credentials.split('://')[0]}://…@{rest}" if at else url


def closed_error() -> UnreachableError:
    return UnreachableError("SF-BUS-CLOSED", "the bus connection was closed while it was in use")


class Connection:
    """A nats client with its callbacks. on_reconnected is called after every re-established connection."""

    def __init__(self, servers: list[str], on_reconnected: Callable[[], None]) -> None:
        self.client = Client()
        self._servers = servers
        self._shown = ",".join(_redacted(server) for server in servers)
        self._on_reconnected = on_reconnected
        self._last_error = ("", 0.0)

    async def open(self) -> None:
        """Returns when connected, however long that takes."""
        await self.client.connect(
            servers=self._servers,
            name="specfleet",
            allow_reconnect=True,
            max_reconnect_attempts=-1,
            reconnect_time_wait=RECONNECT_WAIT_S,  # type: ignore[arg-type]  # annotated int, passed to asyncio.sleep
            connect_timeout=_CONNECT_TIMEOUT_S,
            ping_interval=_PING_INTERVAL_S,
            max_outstanding_pings=2,
            pending_size=_PENDING_BYTES,
            error_cb=self._on_error,
            disconnected_cb=self._on_disconnected,
            reconnected_cb=self._reconnected,
        )
        log.debug("bus connected", servers=self._shown)

    async def close(self) -> None:
        """Sends what is buffered (acks), for at most a second, and closes."""
        if self.client.is_connected:
            try:
                await self.client.flush(timeout=1)
            except (*TRANSIENT, nats.errors.Error):
                log.debug("bus closed before everything was sent", servers=self._shown)
        await self.client.close()

    async def _on_error(self, error: Exception) -> None:
        # While a server is down the same refusal arrives several times a second.
        text, now = f"{type(error).__name__}: {error}", time.monotonic()
        if text != self._last_error[0] or now - self._last_error[1] > _REPEAT_LOG_AFTER_S:
            self._last_error = (text, now)
            log.warning("bus error; trying again", servers=self._shown, error=text)

    async def _on_disconnected(self) -> None:
        if not self.client.is_closed:
            log.warning("bus connection lost; reconnecting", servers=self._shown)

    async def _reconnected(self) -> None:
        self._last_error = ("", 0.0)
        log.info("bus reconnected", servers=self._shown)
        self._on_reconnected()
