"""Readiness probes: does a service serve? Plain asyncio, so that the supervisor, which forks, holds no gRPC threads."""

import asyncio
import contextlib

from specfleet.ctl.topology import LOOPBACK, Probe

# Loopback answers in milliseconds; a service that needs a second to accept is not ready.
PROBE_TIMEOUT_S = 1.0


async def check(probe: Probe, port: int, host: str = LOOPBACK) -> bool:
    """One attempt; False on refusal, time-out or a wrong answer."""
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                return await _ask(probe, reader, writer)
            finally:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
    except (OSError, TimeoutError, EOFError, ValueError):
        return False


async def _ask(probe: Probe, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    match probe.kind:
        case "tcp":
            return True
        case "nats":
            return (await reader.readline()).startswith(b"INFO ")
        case "http":
            return await _get(probe.path, reader, writer) is not None
        case "pool":
            return _pool_capacity(await _get("/metrics", reader, writer) or b"") > 0


async def _get(path: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes | None:
    """The body when the status is 200, else None."""
    writer.write(f"GET {path} HTTP/1.1\r\nHost: {LOOPBACK}\r\nConnection: close\r\n\r\n".encode())
    await writer.drain()
    if b" 200 " not in await reader.readline():
        return None
    length = 0
    while (line := await reader.readline()).strip():
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length":
            length = int(value)
    # Not up to the end of the stream: Mooncake keeps the connection open whatever it is asked.
    return await reader.readexactly(length)


def _pool_capacity(metrics: bytes) -> float:
    """Bytes of mounted segments, from the master's metrics."""
    for line in metrics.splitlines():
        name, _, value = line.partition(b" ")
        if name == b"master_total_capacity_bytes":
            return float(value)
    return 0.0
