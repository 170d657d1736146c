"""The verdict, and the report as JSON for machines and Markdown for people."""

import json
import os
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import structlog

from specfleet.contracts.errors import ExportError
from specfleet.drafts.export import write_acceptance
from specfleet.gate.checks import FAIL, PASS, Check

log = structlog.get_logger()

_PACKAGES = ("specfleet", "torch", "transformers", "safetensors")


def finish_report(report: dict[str, Any], checks: Sequence[Check], seconds: float) -> None:
    """Adds checks, versions, wall time and the verdict: FAIL when any check fails."""
    report["checks"] = [check.to_dict() for check in checks]
    report["versions"] = {name: version(name) for name in _PACKAGES} | {"python": platform.python_version()}
    report["wall_s"] = round(seconds, 2)
    report["verdict"] = FAIL if any(check.result == FAIL for check in checks) else PASS


def write_report(report: Mapping[str, Any], output_dir: Path, export_dir: Path) -> None:
    """report.json and report.md, each whole or not at all; the export's model card gets the acceptance table."""
    output_dir.mkdir(parents=True, exist_ok=True)
    _replace(output_dir / "report.json", json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    _replace(output_dir / "report.md", render(report))
    if report["acceptance_length"]:
        try:
            write_acceptance(export_dir, acceptance_markdown(report))
        except ExportError as error:
            log.warning("model card not updated", error=str(error))


def render(report: Mapping[str, Any]) -> str:
    checks = "\n".join(f"| {c['name']} | {c['result']} | {_cell(c['detail'])} |" for c in report["checks"])
    parts = [
        f"# Gate: {report['verdict']}",
        f"Draft `{Path(report['export']).name}` of run `{report['run_id'] or '–'}` on target `{Path(report['target']).name}`, "
        f"{report['rows']} held-out rows, {report['num_draft_tokens']} draft tokens per round, {report['dtype']} on "
        f"{report['device']}, {report['wall_s']:.0f} s.",
        "## Checks",
        f"| check | result | detail |\n|---|---|---|\n{checks}",
    ]
    if report["acceptance_length"]:
        parts += ["## Acceptance length", acceptance_markdown(report)]
    if report["lossless"].get("rows"):
        parts += ["## Lossless decoding (float32)", _lossless_table(report["lossless"]["rows"], report["sampling"])]
    if report["served"].get("rows"):
        parts += ["## Served", _served_table(report["served"])]
    parts += ["## Versions", ", ".join(f"{name} {number}" for name, number in report["versions"].items())]
    return "\n\n".join(parts) + "\n"


def acceptance_markdown(report: Mapping[str, Any]) -> str:
    """Tokens committed per target pass, per source; n-gram lookup is what no training at all reaches."""
    lines = [
        "| source | rows (finished) | before | after | n-gram | after, finished rows | n-gram, finished rows | accepted at "
        "position 1, 2, … |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for source, row in report["acceptance_length"].items():
        positions = " ".join(f"{share:.2f}" for share in row["per_position"])
        lines.append(
            f"| {_cell(source)} | {row['rows']} ({row['stop_rows']}) | {_number(row['before'])} | {_number(row['after'])} | "
            f"{_number(row['ngram'])} | {_number(row['after_stop_rows'])} | {_number(row['ngram_stop_rows'])} | {positions} |"
        )
    notes = [
        "Mean tokens committed per target pass (1 is no speculation) on greedy answers of the target, batch of one."
    ]
    loops = {source: row["looping_rows"] for source, row in report["acceptance_length"].items() if row["looping_rows"]}
    if loops:
        shown = ", ".join(f"{source} {count}" for source, count in loops.items())
        notes.append(
            f"Answers that repeat themselves flatter every drafter, n-gram lookup most of all. Looping rows: {shown}."
        )
    return "\n".join(lines) + "\n\n" + " ".join(notes)


def _lossless_table(rows: Sequence[Mapping[str, Any]], sampling: Mapping[str, Any] | None) -> str:
    columns = ["source", "row", "new tokens", "identical", "acceptance length"]
    if sampling is not None:
        limits = (f", top-k {sampling['top_k']}" if sampling["top_k"] else "") + (
            f", top-p {sampling['top_p']:g}" if sampling["top_p"] < 1 else ""
        )
        columns.append(f"{sampling['rule']} at temperature {sampling['temperature']:g}{limits}")
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for row in rows:
        where = (
            "yes"
            if row["identical"]
            else f"NO, from token {row['first_difference']} (logit gap {row['logit_gap']:.3g})"
        )
        cells = [_cell(row["source"]), _cell(row["id"]), str(row["tokens"]), where, _number(row["acceptance_length"])]
        if sampling is not None:
            cells.append(_number(row["sampled_acceptance_length"]))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _served_table(served: Mapping[str, Any]) -> str:
    lines = [
        f"{served['engine']}, {served['algorithm']}, {served['num_draft_tokens']} draft tokens, {served['dtype']} on "
        f"{served['device']}: acceptance length {served['acceptance_length']:.3f}, reference decoder "
        f"{served['reference_acceptance_length']:.3f}.",
        "",
        "| source | row | new tokens | not the target's likeliest | rounds | rounds of the reference |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {_cell(row['source'])} | {_cell(row['id'])} | {row['tokens']} | {row['differences']} | {row['rounds']} | "
        f"{row['reference_rounds']} |"
        for row in served["rows"]
    ]
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
