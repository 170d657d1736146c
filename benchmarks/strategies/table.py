"""Acceptance lengths by source, over all rows and over those whose answer ended by itself (finish = stop)."""

from collections.abc import Mapping, Sequence
from typing import Any

from specfleet.data.prompt_set import Prompt
from specfleet.drafts.acceptance import Acceptance, total_acceptance

Lengths = dict[str, dict[str, float]]
"""Source → {all, stop}. Answers cut at the limit mostly loop, which flatters every drafter and most of all an n-gram lookup."""


def by_source(rows: Sequence[Prompt], counts: Sequence[Acceptance]) -> Lengths:
    table = {}
    for source in sorted({row.source for row in rows}):
        every = [(row, count) for row, count in zip(rows, counts, strict=True) if row.source == source]
        stop = [count for row, count in every if row.finish == "stop"]
        lengths = {"all": total_acceptance([count for _, count in every]).length}
        if stop:
            lengths["stop"] = total_acceptance(stop).length
        table[source] = {name: round(length, 3) for name, length in lengths.items()}
    return table


def render(result: Mapping[str, Any]) -> str:
    """One line per drafter: per source the acceptance length over all rows, and over finished ones in brackets."""
    baselines, cases = result["baselines"], result["strategies"]
    sources = sorted({source for lengths in baselines.values() for source in lengths})
    lines = [["", *sources, "tokens/s", "GiB"]]
    lines += [[name, *_cells(lengths, sources), "", ""] for name, lengths in baselines.items()]
    failed = [f"{name}: {told['error']}" for name, told in cases.items() if "error" in told]
    for name, told in cases.items():
        if "error" in told:
            continue
        title, peak = f"{name} (k={told['guesses']})", "" if told["peak_gib"] is None else f"{told['peak_gib']:.1f}"
        lines.append([f"{title} untrained", *_cells(told["untrained"], sources), "", ""])
        lines.append([title, *_cells(told["tau"], sources), f"{told['tokens_per_s']:,}", peak])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([*table, *failed])


def _cells(lengths: Lengths, sources: Sequence[str]) -> list[str]:
    return [
        f"{found['all']:.2f} ({found['stop']:.2f})" if "stop" in found else f"{found['all']:.2f}"
        for found in (lengths[source] for source in sources)
    ]
