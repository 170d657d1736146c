"""One gate job from request to report: load, compare, measure acceptance, decode losslessly, judge. Top to bottom."""

import shlex
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from specfleet.contracts.errors import ConfigError, ExportError
from specfleet.data.prompt_set import PromptSet
from specfleet.drafts.base import Draft
from specfleet.drafts.export import export_engine, load_export
from specfleet.gate.checks import FAIL, PASS, SKIP, Check, Origin, check_target, check_tokenizer, check_weights
from specfleet.gate.lossless import decode_both, lossless_report, sampling_rule, shortest
from specfleet.gate.measure import measure, ngram_table, source_table
from specfleet.gate.report import finish_report, write_report
from specfleet.gate.rows import EvalRow, select_rows
from specfleet.gate.serving import Serving, check_served, served_report, serving_depth, serving_dtype
from specfleet.sglang.interpreter import find_python, sglang_version
from specfleet.sglang.speculation import why_not_served
from specfleet.target.facts import TargetFacts, read_target_facts
from specfleet.target.hub import target_dir
from specfleet.wire.gate_pb2 import StartGateRequest

Progress = Callable[[str, int, int], None]

DEFAULT_DRAFT_TOKENS = 5
# Short: losslessness breaks within the first rounds or not at all, and fp32 decoding on a CPU is slow.
DEFAULT_LOSSLESS_TOKENS = 32
DEFAULT_SERVE_TOKENS = 32


def evaluate(
    request: StartGateRequest, device: str, progress: Progress, sglang_python: str = "", sglang_flags: str = ""
) -> dict[str, Any]:
    """The report. A draft that does not pass is a report with verdict FAIL; what cannot be judged raises SpecfleetError."""
    started = time.monotonic()
    device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    depth = request.num_draft_tokens or DEFAULT_DRAFT_TOKENS
    progress("loading", 0, 1)
    rule = sampling_rule(request)
    # A missing engine is told before the long work, not after it.
    python = find_python(sglang_python) if request.serve_engine else ""
    engine_version = sglang_version(python) if python else ""
    facts = read_target_facts(target_dir(request.target))
    prompts = PromptSet.open(request.eval_set_uri)
    rows = select_rows(prompts, request.max_rows_per_source)
    report: dict[str, Any] = {
        "format": 1,
        "run_id": request.run_id,
        "export": request.export_dir,
        "baseline": request.baseline_export_dir,
        "target": str(facts.path),
        "eval_set": prompts.digest,
        "num_draft_tokens": depth,
        "sampling": None if rule is None else {"rule": rule.name, **asdict(rule.sampling)},
        "dtype": request.dtype or "bfloat16",
        "device": device,
        "rows": len(rows),
        "acceptance_length": {},
        "lossless": {},
        "served": {},
    }
    checks = [check_tokenizer(prompts, facts)]
    try:
        draft = load_export(request.export_dir)
    except ExportError as error:
        # Not an accident of this machine but the draft's own defect: a verdict.
        checks.append(Check("loader_table", FAIL, error.message))
        return _close(report, checks, request, started)
    checks.append(
        Check("loader_table", PASS, f"{len(draft.state_dict())} tensors, names and shapes as the engine reads them")
    )
    origin = Origin.of(Path(request.export_dir))
    checks += check_weights(Path(request.export_dir), draft, origin, request.run_id)
    checks.append(check_target(origin, facts))
    drafts = {"after": draft}
    if request.baseline_export_dir:
        drafts["before"] = _baseline(request.baseline_export_dir, draft)

    progress("acceptance", 0, len(rows))
    counts = measure(
        rows, drafts, facts.path, report["dtype"], depth, device, lambda n: progress("acceptance", n, len(rows))
    )
    counts["ngram"] = ngram_table(rows, depth)
    report["acceptance_length"] = source_table(rows, counts)
    checks.append(_improved(report["acceptance_length"], request))

    decoded = decode_both(
        rows,
        draft,
        facts.path,
        per_source=request.lossless_rows,
        new_tokens=request.lossless_new_tokens or DEFAULT_LOSSLESS_TOKENS,
        depth=depth,
        device=device,
        progress=lambda done, total: progress("lossless", done, total),
        rule=rule,
    )
    report["lossless"] = lossless_report(decoded)
    checks.append(_lossless(report["lossless"]))
    if request.serve_engine:
        reason = why_not_served(draft.kind, export_engine(request.export_dir), engine_version, device)
        report["served"] = (
            {"not_served": reason}
            if reason
            else _serve(request, rows, draft, facts, depth, device, python, sglang_flags, progress)
        )
        checks.append(check_served(report["served"]))
    return _close(report, checks, request, started)


def _baseline(export_dir: str, draft: Draft) -> Draft:
    """Raises ConfigError SF-GATE-BASELINE when the two drafts do not read the same layers: nothing would be comparable."""
    baseline = load_export(export_dir)
    ours, theirs = tuple(draft.config.layer_ids), tuple(baseline.config.layer_ids)
    if ours != theirs:
        raise ConfigError(
            "SF-GATE-BASELINE", f"the draft reads layers {list(ours)}, the baseline {export_dir} reads {list(theirs)}"
        )
    return baseline


def _improved(table: dict[str, dict[str, Any]], request: StartGateRequest) -> Check:
    if not request.baseline_export_dir:
        return Check("improvement", SKIP, "no baseline export was given")
    behind = [f"{s}: {row['before']} → {row['after']}" for s, row in table.items() if row["after"] <= row["before"]]
    if not behind:
        return Check("improvement", PASS, f"acceptance length rose on all {len(table)} sources")
    result = FAIL if request.require_improvement else SKIP
    return Check("improvement", result, f"acceptance length did not rise on {'; '.join(behind)}")


def _lossless(report: dict[str, Any]) -> Check:
    if not report["rows"]:
        return Check("lossless", SKIP, "no rows were asked for (lossless_rows is 0)")
    broken = [
        f"{row['source']} row {row['id']}: first difference at new token {row['first_difference']}"
        for row in report["rows"]
        if not row["identical"]
    ]
    if broken:
        return Check("lossless", FAIL, "; ".join(broken))
    return Check("lossless", PASS, f"{len(report['rows'])} rows, {report['tokens']} tokens identical in float32")


def _serve(
    request: StartGateRequest,
    rows: list[EvalRow],
    draft: Draft,
    facts: TargetFacts,
    depth: int,
    device: str,
    python: str,
    flags: str,
    progress: Progress,
) -> dict[str, Any]:
    serving = Serving(
        python=python,
        target_dir=facts.path,
        export_dir=Path(request.export_dir),
        device=device,
        dtype=serving_dtype(request.dtype or facts.dtype, device),
        depth=serving_depth(draft, depth),
        new_tokens=request.serve_new_tokens or DEFAULT_SERVE_TOKENS,
        log_path=Path(request.output_dir) / "sglang.log",
        flags=tuple(shlex.split(flags)),
    )
    chosen = shortest(rows, request.serve_rows or 1)
    return served_report(chosen, draft, serving, lambda done, total: progress("serving", done, total))


def _close(report: dict[str, Any], checks: list[Check], request: StartGateRequest, started: float) -> dict[str, Any]:
    finish_report(report, checks, time.monotonic() - started)
    write_report(report, Path(request.output_dir), Path(request.export_dir))
    return report
