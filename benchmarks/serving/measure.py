"""Real SGLang servers side by side on one device, and how fast each answers held-out prompts."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from specfleet.gate.rows import EvalRow
from specfleet.gate.serving import Served, answer
from specfleet.sglang.client import SGLangClient
from specfleet.sglang.launch import Server, ServerOptions

# Room for guesses behind an answer, and for what SGLang keeps free of its context.
HEADROOM = 64
# Loading, kernels compiled for the first time, graphs: two minutes are normal on a GPU, and on a busy CPU.
START_S = 300.0
# Kernels for a batch are compiled when it first comes.
WARM_TOKENS = 32
# What is kept of an answer beside its row.
TOLD = ("ids", "finish", "rounds", "histogram")
Measured = tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]


def server_options(
    target: Path, device: str, dtype: str, longest: int, most: int, memory_fraction: float, flags: Sequence[str]
) -> ServerOptions:
    """The same for every server; a draft only adds to it. longest: prompt and answer, in tokens. most: requests in flight."""
    context = longest + HEADROOM
    return ServerOptions(
        target,
        device,
        dtype,
        context_length=context if device == "cpu" else 0,
        # Bounded, so that servers that start at the same time fit beside one another whatever share each is given.
        pool_tokens=2 * most * context,
        memory_fraction=memory_fraction,
        prefill_graphs=False,
        # Prompts come again: none may be answered from the prefix cache.
        flags=(
            *("--disable-radix-cache", "--max-running-requests", str(2 * most)),
            *("--cuda-graph-max-bs-decode", str(most), *flags),
        ),
    )


async def start(python: str, options: Mapping[str, ServerOptions], logs: Path, graphs: bool) -> dict[str, Server]:
    """All servers, started at the same time. Raises HostError SF-SGLANG-START of the first that does not, ends the others."""
    servers = {
        name: Server(python, replace(chosen, decode_graphs=graphs), logs / f"sglang-{name}.log")
        for name, chosen in options.items()
    }
    starting = [asyncio.create_task(server.start(START_S)) for server in servers.values()]
    try:
        await asyncio.gather(*starting)
    except BaseException:
        for task in starting:
            task.cancel()
        await asyncio.gather(*starting, return_exceptions=True)
        await stop(servers)
        raise
    return servers


async def stop(servers: Mapping[str, Server]) -> None:
    await asyncio.gather(*(server.stop() for server in servers.values()))


async def measure(url: str, rows: Sequence[EvalRow], new_tokens: int, concurrency: int) -> Measured:
    """(tokens/s and rounds by source, one answer a row in order of source), greedily, with `concurrency` requests in flight.

    Every source is asked at least twice the concurrency, so that the end, when requests run out, weighs little.
    """
    async with SGLangClient(url) as client:
        warm = [rows[index % len(rows)] for index in range(concurrency)]
        await _answers(client, warm, min(WARM_TOKENS, new_tokens), concurrency)
        sources: dict[str, dict[str, Any]] = {}
        answers: list[dict[str, Any]] = []
        for source in sorted({row.source for row in rows}):
            group = [row for row in rows if row.source == source]
            times = -(-2 * concurrency // len(group)) if concurrency > 1 else 1
            began = time.monotonic()
            served = await _answers(client, group * times, new_tokens, concurrency)
            seconds = time.monotonic() - began
            sources[source] = {
                "requests": len(served),
                "tokens": sum(len(item.ids) for item in served),
                "rounds": sum(item.rounds for item in served),
                "seconds": round(seconds, 3),
            }
            answers += [{name: getattr(item, name) for name in TOLD} for item in served[: len(group)]]
    return {name: with_rates(row) for name, row in sources.items()}, answers


def with_rates(row: dict[str, Any]) -> dict[str, Any]:
    """Adds tokens/s and, where guesses were verified, the acceptance length: the first token of an answer is not guessed."""
    rates = {"tokens_per_s": round(row["tokens"] / row["seconds"], 1)}
    if row["rounds"]:
        rates["acceptance_length"] = round((row["tokens"] - row["requests"]) / row["rounds"], 4)
    return {**row, **rates}


def total(sources: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """All sources together."""
    names = ("requests", "tokens", "rounds", "seconds")
    return with_rates({name: sum(row[name] for row in sources.values()) for name in names})


async def _answers(client: SGLangClient, rows: Sequence[EvalRow], new_tokens: int, concurrency: int) -> list[Served]:
    slots = asyncio.Semaphore(concurrency)

    async def one(row: EvalRow) -> Served:
        async with slots:
            return await answer(client, row, new_tokens)

    return await asyncio.gather(*(one(row) for row in rows))
