"""What was measured, as numbers for the result file and as a table."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.capture_overhead.load import PARTS, Job, Outcome
from benchmarks.capture_overhead.servers import Load

GOAL = 0.85


@dataclass(frozen=True)
class Measurement:
    """One server under load at one prompt length."""

    tokens_per_s: float
    seconds_per_token: dict[str, float]
    """What the server says it spent on features, by part."""
    client_cores: float
    """Of the busiest client process."""
    server: Load
    failures: list[str]


def measurement(job: Job, outcomes: Sequence[Outcome], server: Load) -> Measurement:
    """Raises ValueError when too little was answered to tell."""
    answered = sum(len(outcome.answered_at) for outcome in outcomes)
    spent = {part: sum(outcome.seconds[part] for outcome in outcomes) for part in PARTS}
    return Measurement(
        tokens_per_s(job, [moment for outcome in outcomes for moment in outcome.answered_at]),
        {part: seconds / (answered * job.length) for part, seconds in spent.items()},
        max(outcome.cores for outcome in outcomes),
        server,
        [message for outcome in outcomes for message in outcome.failures],
    )


def tokens_per_s(job: Job, answered_at: Sequence[float]) -> float:
    """Slope of the tokens answered over time, by least squares: answers come in bursts of a batch, and counting them between
    two moments would be off by up to a batch."""
    moments = sorted(moment for moment in answered_at if job.measure_from <= moment <= job.measure_until)
    if len(moments) < 3 or moments[0] == moments[-1]:
        raise ValueError(f"{len(moments)} answers of {job.length} tokens are too few: measure longer (--window)")
    return float(np.polyfit(np.array(moments) - moments[0], np.arange(len(moments)), 1)[0]) * job.length


def summary(plain: Sequence[Measurement], captured: Sequence[Measurement], bytes_per_token: int) -> dict[str, Any]:
    """Of one prompt length. Rates are medians of the rounds, `best` the highest."""
    rates = [[one.tokens_per_s for one in rounds] for rounds in (plain, captured)]
    before, after = (statistics.median(values) for values in rates)
    spent = {part: statistics.median(one.seconds_per_token[part] for one in captured) for part in PARTS}
    overhead = 1 / after - 1 / before
    failures = [message for one in (*plain, *captured) for message in one.failures]
    return {
        "plain_tokens_per_s": round(before),
        "captured_tokens_per_s": round(after),
        "ratio": round(after / before, 3),
        "best": {
            "plain_tokens_per_s": round(max(rates[0])), "captured_tokens_per_s": round(max(rates[1])),
            "ratio": round(max(rates[1]) / max(rates[0]), 3),
        },
        "rounds": {"plain": [round(rate) for rate in rates[0]], "captured": [round(rate) for rate in rates[1]]},
        "overhead_us_per_token": round(overhead * 1e6, 3),
        "split_us_per_token": {part: round(seconds * 1e6, 3) for part, seconds in spent.items()},
        "published_gb_s": round(after * bytes_per_token / 1e9, 3),
        # How much of the overhead these parts would be, if none of them ran beside the forward pass.
        "split_over_overhead": round((spent["copy"] + spent["hash"] + spent["put"]) / overhead, 2) if overhead > 0 else 0.0,
        # What comes near 1 is what everything waits for: copies on their stream, or the one thread that hashes and puts.
        "busy": {"copies": round(spent["copy"] * after, 2), "writer": round((spent["hash"] + spent["put"]) * after, 2)},
        "failures": {"count": len(failures), "first": failures[0] if failures else ""},
        "client_cores": round(max(one.client_cores for one in (*plain, *captured)), 2),
        "server": {name: server(rounds) for name, rounds in (("plain", plain), ("captured", captured))},
    }  # fmt: skip


def server(rounds: Sequence[Measurement]) -> dict[str, Any]:
    """Medians of what a server's processes, batches and device did. Full batches and a busy device: nothing is wasted."""
    loads = [one.server for one in rounds]
    told: dict[str, Any] = {"cores": _busiest([load.cores for load in loads])}
    for name in ("batches_per_s", "tokens_per_batch", "device_busy"):
        values = [value for load in loads if (value := getattr(load, name)) is not None]
        if values:
            told[name] = round(statistics.median(values), 2)
    return told


def overall(by_length: dict[str, Any]) -> dict[str, Any]:
    """As many tokens of every length: harmonic means."""
    plain, captured = (
        statistics.harmonic_mean([told[name] for told in by_length.values()])
        for name in ("plain_tokens_per_s", "captured_tokens_per_s")
    )
    return {
        "plain_tokens_per_s": round(plain),
        "captured_tokens_per_s": round(captured),
        "ratio": round(captured / plain, 3),
        "worst_ratio": min(told["ratio"] for told in by_length.values()),
        "goal": GOAL,
    }


def floor_us_per_token(limits: dict[str, float], bytes_per_token: int) -> dict[str, float]:
    """What each step takes at the machine's own speed."""
    rates = {"copy": "d2h_pinned_gb_s", "hash": "hash_one_thread_gb_s", "put": "put_gb_s"}
    return {part: round(bytes_per_token / limits[name] / 1e3, 3) for part, name in rates.items() if name in limits}


def _busiest(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    names = {name for cores in rounds for name in cores}
    medians = {name: statistics.median(cores.get(name, 0.0) for cores in rounds) for name in names}
    return {
        name: round(cores, 2) for name, cores in sorted(medians.items(), key=lambda item: -item[1]) if cores >= 0.05
    }


def show(result: dict[str, Any]) -> None:
    console = Console(width=140)
    table = Table(title="prefill, tokens/s (median of rounds)")
    for column in ("prompt", "plain", "captured", "ratio", "GB/s", "overhead", *PARTS, "busy: copies writer", "client"):
        table.add_column(column, justify="right")
    for length, told in result["by_length"].items():
        table.add_row(
            length, f"{told['plain_tokens_per_s']:,}", f"{told['captured_tokens_per_s']:,}", f"{told['ratio']:.3f}",
            f"{told['published_gb_s']:.2f}", f"{told['overhead_us_per_token']:.2f} µs",
            *(f"{told['split_us_per_token'][part]:.2f}" for part in PARTS),
            " ".join(f"{share:.0%}" for share in told["busy"].values()), f"{told['client_cores']:.0%}",
        )  # fmt: skip
    console.print(table)
    console.print(
        f"overall {result['ratio']:.3f} of plain (goal {GOAL}), worst {result['worst_ratio']:.3f}; "
        f"{result['bytes_per_token']} bytes per token"
    )
    for name in ("limits", "floor_us_per_token", "fidelity"):
        if name in result:
            console.print(f"{name}: {result[name]}", soft_wrap=True)
