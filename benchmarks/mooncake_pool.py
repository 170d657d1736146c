"""A Mooncake pool of a benchmark's own: master and owner on loopback, as the embedded stack starts them, pre-faulted."""

import asyncio
import contextlib
import importlib.util
import os
import socket
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

from specfleet.contracts.errors import HostError
from specfleet.store.prefault import prefault
from specfleet.store.processes import master_command, master_ready, owner_command, owner_ready
from specfleet.telemetry.process import dies_with

READY_S = 30.0


@contextlib.contextmanager
def mooncake_pool(name: str, pool_bytes: int, *, shared_memory: bool = True, log: Path | None = None) -> Iterator[str]:
    """The URL of an empty pool. Without shared_memory clients reach it over TCP. `log`: where both processes write.

    Raises HostError SF-HOST-MOONCAKE when Mooncake is missing, TimeoutError when it does not become ready.
    """
    master_port, metrics_port, owner_port = (_free_port() for _ in range(3))
    master, metrics, owner = (f"127.0.0.1:{port}" for port in (master_port, metrics_port, owner_port))
    client = f"client={owner}&" if shared_memory else ""
    url = f"mooncake://{master}/{name}?{client}pool={pool_bytes}&metrics={metrics}"
    with contextlib.ExitStack() as stack:
        output = stack.enter_context((log or Path(os.devnull)).open("wb"))
        _spawn(stack, master_command(port=master_port, metrics_port=metrics_port), output.fileno())
        asyncio.run(_until(lambda: master_ready(metrics)))
        _spawn(stack, owner_command(port=owner_port, master=master, pool_bytes=pool_bytes), output.fileno())
        asyncio.run(_until(lambda: owner_ready(owner, metrics, pool_bytes)))
        prefault(url)
        yield url


def _spawn(stack: contextlib.ExitStack, argv: list[str], output: int) -> None:
    found = importlib.util.find_spec("mooncake")
    if found is None or found.origin is None:
        raise HostError("SF-HOST-MOONCAKE", "Mooncake is not installed: pip install 'specfleet[mooncake-cpu]'")
    # The package's own program: a package that was only unpacked has no console scripts.
    program = Path(found.origin).parent / argv[0]
    process = subprocess.Popen(
        [str(program), *argv[1:]], stdout=output, stderr=output, preexec_fn=dies_with(os.getpid())
    )
    stack.callback(process.wait)
    stack.callback(process.kill)


async def _until(ready: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(READY_S):
        while not await ready():  # noqa: ASYNC110  another process: nothing to wait on
            await asyncio.sleep(0.02)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
