"""The two servers under test: the same flags on the same device, one of them with the plugin switched on."""

import asyncio
import contextlib
import os
import re
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch

from specfleet.capture.engines.serving import server_options
from specfleet.capture.engines.table import EngineOptions
from specfleet.sglang.interpreter import find_python
from specfleet.sglang.launch import Server, ServerOptions, server_argv
from specfleet.target.facts import read_target_facts
from specfleet.wire.records_pb2 import CaptureContract

PROFILER = Path(__file__).parent / "profiler"
# Of what is free when a server starts; the other one takes its part of the rest meanwhile.
MEMORY_FRACTION = 0.6
POOL_TOKENS = {"cuda": 262_144, "cpu": 16_384}
# A line of SGLang's log for each prefill batch.
PREFILL = re.compile(rb"Prefill batch.*?#new-token: (\d+)")
# The driver averages over a sixth of a second to a second.
BUSY_EVERY_S = 0.3


@dataclass(frozen=True)
class Pair:
    plain: Server
    captured: Server
    flags: dict[str, str]
    """Command lines, without the interpreter and the port."""

    def of(self, captured: bool) -> Server:
        return self.captured if captured else self.plain


def pair_options(
    contract: CaptureContract, device: str, store_url: str, flags: str, plain_graphs: bool, profile: Path
) -> tuple[ServerOptions, ServerOptions]:
    """Plain, captured. The flags are those of a capture worker's own server; `flags` come after all others."""
    engine = EngineOptions(
        "sglang",
        device=device,
        store_url=store_url,
        sglang_flags=f"--log-level info {flags}",
        memory_fraction=MEMORY_FRACTION,
    )
    facts = read_target_facts(contract.target)
    captured = server_options(engine, contract, facts.path, facts.text_config)
    path = os.pathsep.join([str(PROFILER), *filter(None, [os.environ.get("PYTHONPATH")])])
    profiled = {"PYTHONPATH": path, "SPECFLEET_BENCH_PROFILE": str(profile)}
    captured = replace(captured, pool_tokens=POOL_TOKENS[device], env={**captured.env, **profiled})
    return replace(captured, env=profiled, prefill_graphs=plain_graphs), captured


@contextlib.asynccontextmanager
async def started(plain: ServerOptions, captured: ServerOptions, logs: Path) -> AsyncIterator[Pair]:
    """Both servers, started side by side. Raises HostError SF-SGLANG-START with the end of the log of one that failed."""
    python = find_python()
    pair = Pair(
        Server(python, plain, logs / "plain.log"),
        Server(python, captured, logs / "captured.log"),
        {
            name: " ".join(server_argv("", options, 0)[3:])
            for name, options in (("plain", plain), ("captured", captured))
        },
    )
    async with contextlib.AsyncExitStack() as stack:
        starts = [asyncio.create_task(server.start()) for server in (pair.plain, pair.captured)]
        for server in (pair.plain, pair.captured):
            stack.push_async_callback(server.stop)
        try:
            await asyncio.gather(*starts)
        except BaseException:
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
            raise
        yield pair


def processes(server: Server) -> dict[int, str]:
    """Process ids of the server, and what SGLang calls them. The main process serves HTTP."""
    main = psutil.Process(server.pid)
    found = {main.pid: "http"}
    for process in main.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            found[process.pid] = Path(process.cmdline()[0].removeprefix("sglang::")).name
    return found


@dataclass(frozen=True)
class Load:
    """What a server did while it was measured."""

    cores: dict[str, float]
    """Of each of its processes."""
    batches_per_s: float | None = None
    tokens_per_batch: float | None = None
    """As its log says."""
    device_busy: float | None = None
    """Share of the time in which some kernel ran, as the driver says; None without a GPU."""


async def watch(server: Server, begin: float, end: float) -> Load:
    """Between two moments of the monotonic clock."""
    await asyncio.sleep(begin - time.monotonic())
    before, offset, began = cpu_seconds(server), server.log_path.stat().st_size, time.monotonic()
    busy = []
    while (left := end - time.monotonic()) > 0:
        await asyncio.sleep(min(BUSY_EVERY_S, left))
        if torch.cuda.is_available():
            busy.append(torch.cuda.utilization() / 100)
    after, seconds = cpu_seconds(server), time.monotonic() - began
    with server.log_path.open("rb") as log:
        log.seek(offset)
        sizes = [int(tokens) for tokens in PREFILL.findall(log.read())]
    return Load(
        {name: (used - before.get(name, 0.0)) / seconds for name, used in after.items()},
        len(sizes) / seconds if sizes else None,
        sum(sizes) / len(sizes) if sizes else None,
        sum(busy) / len(busy) if busy else None,
    )


def cpu_seconds(server: Server) -> dict[str, float]:
    """CPU time of the server's processes so far, by name."""
    used: dict[str, float] = defaultdict(float)
    for pid, name in processes(server).items():
        with contextlib.suppress(psutil.Error):
            times = psutil.Process(pid).cpu_times()
            used[name] += times.user + times.system
    return used
