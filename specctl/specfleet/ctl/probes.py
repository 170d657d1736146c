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
    except (OSError, TimeoutError):
        return False


async def _ask(probe: Probe, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    match probe.kind:
        case "tcp":
            return True
        case "nats":
            return (await reader.readline()).startswith(b"INFO ")
        case "http":
            writer.write(f"GET {probe.path} HTTP/1.0\r\nHost: {LOOPBACK}\r\n\r\n".encode())
            await writer.drain()
            return b" 200 " in await reader.readline()
