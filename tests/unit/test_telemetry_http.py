"""/metrics, /healthz, /readyz asked by a real HTTP client over loopback."""

import asyncio
import urllib.error
import urllib.request
from collections.abc import AsyncIterator

import pytest
from prometheus_client import Counter

from specfleet.contracts.errors import ConfigError, HostError
from specfleet.telemetry.http import TelemetryServer

ASKED = Counter("test_telemetry_asked", "Counted by this test.")


class Service:
    def __init__(self) -> None:
        self.state: tuple[bool, str] | Exception = (True, "")

    def ready(self) -> tuple[bool, str]:
        if isinstance(self.state, Exception):
            raise self.state
        return self.state


@pytest.fixture
async def service() -> Service:
    return Service()


@pytest.fixture
async def base(service: Service) -> AsyncIterator[str]:
    server = TelemetryServer("127.0.0.1:0", service.ready)
    yield f"http://127.0.0.1:{await server.start()}"
    await server.stop()


async def get(url: str, method: str = "GET") -> tuple[int, str, str]:
    """(status, content type, body)."""

    def ask() -> tuple[int, str, str]:
        try:
            with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=5) as response:
                return response.status, response.headers["Content-Type"], response.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.headers["Content-Type"], error.read().decode()

    return await asyncio.to_thread(ask)


async def test_metrics_show_the_default_registry(base: str) -> None:
    ASKED.inc(3)
    status, kind, body = await get(f"{base}/metrics?name=x")
    assert status == 200
    assert kind.startswith("text/plain; version=")
    assert "test_telemetry_asked_total 3.0" in body
    assert "process_resident_memory_bytes" in body


async def test_health_and_readiness(base: str, service: Service) -> None:
    assert await get(f"{base}/healthz") == (200, "text/plain; charset=utf-8", "ok\n")
    assert (await get(f"{base}/readyz"))[::2] == (200, "ready\n")
    service.state = (False, "ledger: 3 migrations pending")
    assert (await get(f"{base}/readyz"))[::2] == (503, "ledger: 3 migrations pending\n")
    service.state = RuntimeError("broken check")
    assert (await get(f"{base}/readyz"))[::2] == (503, "readiness check failed: broken check\n")
    assert (await get(f"{base}/healthz"))[0] == 200


async def test_other_paths_and_methods(base: str) -> None:
    assert (await get(f"{base}/"))[0] == 404
    assert (await get(f"{base}/healthz", "POST"))[0] == 405
    assert (await get(f"{base}/healthz", "HEAD"))[::2] == (200, "")


@pytest.mark.parametrize("sent", [b"nonsense\r\n\r\n", b"\x16\x03\x01\r\n\r\n"])
async def test_what_is_not_http_is_answered_400(base: str, sent: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(base.rsplit(":", 1)[1]))
    writer.write(sent)
    assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
    writer.close()
    await writer.wait_closed()


async def test_an_endless_head_is_cut_off(base: str) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(base.rsplit(":", 1)[1]))
    writer.write(b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 10_000)
    with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
        await asyncio.wait_for(reader.readexactly(1), 5)
    writer.close()


async def test_stop_does_not_wait_for_idle_connections(service: Service) -> None:
    server = TelemetryServer("127.0.0.1:0", service.ready)
    port = await server.start()
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    assert (await get(f"http://127.0.0.1:{port}/healthz"))[0] == 200
    await asyncio.wait_for(server.stop(), 2)
    writer.close()
    with pytest.raises(urllib.error.URLError):
        await get(f"http://127.0.0.1:{port}/healthz")


async def test_a_taken_port_is_named(base: str, service: Service) -> None:
    address = base.removeprefix("http://")
    with pytest.raises(HostError, match=address) as caught:
        await TelemetryServer(address, service.ready).start()
    assert caught.value.code == "SF-HOST-PORT-IN-USE"
    with pytest.raises(ConfigError):
        TelemetryServer("0.0.0.0:0", service.ready)
