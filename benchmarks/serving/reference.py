"""What the reference decoder says: about the text that a server wrote with a draft, and about the target's own answers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specfleet.drafts.export import load_export
from specfleet.gate.evaluate import evaluate
from specfleet.gate.rows import EvalRow
from specfleet.gate.serving import Served, Serving, check_served, compare
from specfleet.wire.gate_pb2 import StartGateRequest


def estimate(
    target: Path, export: Path, held_out: Path, num_draft_tokens: int, rows: int, device: str, out: Path
) -> dict[str, Any]:
    """A gate job's acceptance length, by source, on held-out answers that the target wrote itself. rows: of each; 0: all."""
    request = StartGateRequest(
        run_id=out.name, export_dir=str(export), target=str(target), eval_set_uri=str(held_out), dtype="bfloat16",
        num_draft_tokens=num_draft_tokens, max_rows_per_source=rows, output_dir=str(out),
    )  # fmt: skip
    report = evaluate(request, device, lambda stage, done, total: None)
    table: dict[str, Any] = report["acceptance_length"]
    return table


def judge(
    rows: Sequence[EvalRow],
    told: Sequence[dict[str, Any]],
    plain: Sequence[dict[str, Any]],
    serving: Serving,
    engine: str,
) -> dict[str, Any]:
    """told, plain: the answers with the draft and without, source by source (measure.measure).

    By source: answers with the very ids of plain decoding, rounding ties, and rounds beside those the reference needs.
    """
    ordered = sorted(rows, key=lambda row: row.source)
    answers = [Served(row=row, **item) for row, item in zip(ordered, told, strict=True)]
    report = {"engine": engine, **compare(answers, load_export(serving.export_dir), serving)}
    check = check_served(report)
    found = list(zip(report.pop("rows"), plain, strict=True))
    sources = {}
    for source in sorted({row["source"] for row, _ in found}):
        group = [(row, without) for row, without in found if row["source"] == source]
        count = {
            name: sum(row[name] for row, _ in group) for name in ("tokens", "differences", "rounds", "reference_rounds")
        }
        committed = count["tokens"] - len(group)
        sources[source] = {
            "rows": len(group),
            "equal_to_plain": sum(row["ids"] == without["ids"] for row, without in group),
            **count,
            "widest_gap": max(row["widest_gap"] for row, _ in group),
            "acceptance_length": ratio(committed, count["rounds"]),
            "reference_acceptance_length": ratio(committed, count["reference_rounds"]),
        }
    return {**report, "check": {"result": check.result, "detail": check.detail}, "sources": sources}


def ratio(committed: int, rounds: int) -> float | None:
    """The first token of an answer is not guessed, so an answer of one token has no rounds."""
    return round(committed / rounds, 4) if rounds else None


def serving_of(target: Path, export: Path, device: str, dtype: str, depth: int, new_tokens: int) -> Serving:
    """How the judged answers came about."""
    return Serving("", target, export, device, dtype, depth, new_tokens, Path())
