"""The result as text: speed beside plain decoding, acceptance lengths beside the estimates, and whether texts agree."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.serving.measure import total

PLAIN = "plain"


def render(result: Mapping[str, Any]) -> str:
    """Everything measured so far."""
    parts = [_speed(result["serving"]), _acceptance(result), *_agreement(result["reference"])]
    return "\n\n".join(part for part in parts if part)


def _speed(serving: Mapping[str, Mapping[str, Any]]) -> str:
    """Output tokens/s by source, with what a draft gains over plain decoding at the same concurrency in brackets."""
    if not serving:
        return ""
    sources = sorted({source for runs in serving.values() for run in runs.values() for source in run})
    lines = [["output tokens/s", *sources, "all"]]
    for concurrency in sorted({key for runs in serving.values() for key in runs}, key=int):
        plain = serving.get(PLAIN, {}).get(concurrency, {})
        for name, runs in serving.items():
            if run := runs.get(concurrency):
                rates, before = _with_total(run), _with_total(plain) if plain and name != PLAIN else {}
                cells = [_rate(rates.get(source), before.get(source)) for source in (*sources, "all")]
                lines.append([f"{name}, {concurrency} at a time", *cells])
    return columns(lines)


def _with_total(run: Mapping[str, Any]) -> dict[str, Any]:
    return {**run, "all": total(run)}


def _rate(row: Mapping[str, Any] | None, plain: Mapping[str, Any] | None) -> str:
    if row is None:
        return ""
    gain = f" ({row['tokens_per_s'] / plain['tokens_per_s']:.2f}x)" if plain else ""
    rate = row["tokens_per_s"]
    return f"{rate:,.{0 if rate >= 100 else 1}f}{gain}"


def _acceptance(result: Mapping[str, Any]) -> str:
    """SGLang's own count, the reference decoder's on the same text, and the offline estimates on the target's held-out answers."""
    drafts = {name: runs for name, runs in result["serving"].items() if name != PLAIN}
    sources = sorted({source for runs in drafts.values() for run in runs.values() for source in run})
    lines = [["acceptance length", *sources]]
    for name, runs in drafts.items():
        for concurrency, run in runs.items():
            lengths = {source: row.get("acceptance_length") for source, row in run.items()}
            lines.append([f"{name}: SGLang, {concurrency} at a time", *_lengths(lengths, sources)])
        judged = result["reference"].get(name, {}).get("sources", {})
        estimates = result["offline"].get(name, {})
        for title, key, table in (
            ("reference decoder, same text", "reference_acceptance_length", judged),
            ("held-out answers", "after", estimates),
            ("held-out answers, n-gram", "ngram", estimates),
        ):
            if table:
                lengths = {source: row[key] for source, row in table.items()}
                lines.append([f"{name}: {title}", *_lengths(lengths, sources)])
    return columns(lines) if len(lines) > 1 else ""


def _lengths(found: Mapping[str, float | None], sources: Sequence[str]) -> list[str]:
    return [f"{length:.2f}" if (length := found.get(source)) is not None else "" for source in sources]


def _agreement(reference: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for name, told in reference.items():
        rows = sum(row["rows"] for row in told["sources"].values())
        equal = sum(row["equal_to_plain"] for row in told["sources"].values())
        yield f"{name}: {equal} of {rows} answers equal plain decoding's; {told['check']['result']} {told['check']['detail']}"


def columns(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )
