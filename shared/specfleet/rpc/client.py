"""Channels and calls: quick reconnection to a restarted service, errors as SpecfleetError, patience as a number.

channel = connect("127.0.0.1:7070")
run = await call(RunServiceStub(channel).GetRun, GetRunRequest(run_id="r"), timeout_s=10, retry_s=30)
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Iterator
from typing import Any, Protocol, TypeVar

import grpc
import structlog

from specfleet.rpc.address import parse_address
from specfleet.rpc.errors import METADATA_LIMIT_BYTES, from_rpc
from specfleet.rpc.server import MAX_MESSAGE_BYTES

log = structlog.get_logger()

_OPTIONS: list[tuple[str, Any]] = [
    # A killed service is back on its port within a second or two; gRPC's own back-off would reach two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Despite its name the time one connection attempt may take (gRPC core; default 20 s).
    ("grpc.min_reconnect_backoff_ms", 5_000),
    # Notices a peer that vanished without closing the connection (host down, stopped container).
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", METADATA_LIMIT_BYTES),
    ("grpc.absolute_max_metadata_size", METADATA_LIMIT_BYTES),
    # Loopback and private addresses; an HTTP proxy in the environment must not get in between.
    ("grpc.enable_http_proxy", 0),
]
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0

Request = TypeVar("Request", contravariant=True)
Response = TypeVar("Response", covariant=True)


class AioMethod(Protocol[Request, Response]):
    """A unary method of a stub on an aio channel."""

    def __call__(self, request: Request, /, *, timeout: float | None = None) -> Awaitable[Response]: ...


class SyncMethod(Protocol[Request, Response]):
    """A unary method of a stub on a sync channel."""

    def __call__(self, request: Request, /, timeout: float | None = None) -> Response: ...


def connect(address: str) -> grpc.aio.Channel:
    """A channel for coroutines; connects on first use, reconnects by itself. Raises ConfigError for a bad address."""
    return grpc.aio.insecure_channel(str(parse_address(address)), options=_OPTIONS)


def connect_sync(address: str) -> grpc.Channel:
    """A channel for ordinary functions and threads; connects on first use and reconnects by itself."""
    return grpc.insecure_channel(str(parse_address(address)), options=_OPTIONS)


async def call(
    method: AioMethod[Request, Response],
    request: Request,
    *,
    timeout_s: float | None,
    retry_s: float = 0.0,
    address: str = "",
) -> Response:
    """One unary call. timeout_s bounds each try (None: unbounded); while the service is UNAVAILABLE it is tried again
    for up to retry_s (math.inf: for ever), so the method must be idempotent. Raises SpecfleetError, never RpcError.
    """
    give_up_at = time.monotonic() + retry_s
    for pause_s in _pauses():
        try:
            return await method(request, timeout=timeout_s)
        except grpc.RpcError as error:
            if not _try_again(error, give_up_at, pause_s):
                raise from_rpc(error, address) from None
        await asyncio.sleep(pause_s)
    raise AssertionError("the pauses never end")


def call_sync(
    method: SyncMethod[Request, Response],
    request: Request,
    *,
    timeout_s: float | None,
    retry_s: float = 0.0,
    address: str = "",
) -> Response:
    """As call, for a stub on connect_sync's channel; blocks the thread."""
    give_up_at = time.monotonic() + retry_s
    for pause_s in _pauses():
        try:
            return method(request, timeout=timeout_s)
        except grpc.RpcError as error:
            if not _try_again(error, give_up_at, pause_s):
                raise from_rpc(error, address) from None
        time.sleep(pause_s)
    raise AssertionError("the pauses never end")


def _try_again(error: grpc.RpcError, give_up_at: float, pause_s: float) -> bool:
    return error.code() is grpc.StatusCode.UNAVAILABLE and time.monotonic() + pause_s < give_up_at


def _pauses() -> Iterator[float]:
    """50 ms doubling to 1 s, each ± 20 % so that a fleet does not knock in step."""
    pause_s = _FIRST_PAUSE_S
    while True:
        yield pause_s * random.uniform(0.8, 1.2)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
