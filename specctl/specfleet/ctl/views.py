"""Tables for people and documents for machines: stacks, runs, fleets, ledgers."""

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from specfleet.ctl import probes
from specfleet.ctl.output import human_bytes, human_rate
from specfleet.ctl.state import StackState, is_alive
from specfleet.ctl.topology import embedded_site, stack
from specfleet.wire.run_pb2 import Checkpoint, FleetMember, RunSnapshot, VerifyLedgerResponse


def ago(unix_s: float) -> str:
    """Time since, in the largest sensible unit."""
    seconds = max(0.0, time.time() - unix_s)
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit} ago"
    return f"{seconds:.0f} s ago"


def probe_stack(state: StackState) -> dict[str, bool]:
    """Service → does it answer its readiness probes now?"""
    site = embedded_site(Path("."), state.ports, store="directory" if state.store == "directory" else "mooncake")

    async def ask() -> dict[str, bool]:
        services = stack(site)
        answers = await asyncio.gather(
            *(
                asyncio.gather(*(probes.check(probe, state.ports[probe.port]) for probe in service.probes))
                for service in services
            )
        )
        return {service.name: all(answer) for service, answer in zip(services, answers, strict=True)}

    return asyncio.run(ask())


def stack_document(folder: Path, state: StackState | None, serving: Mapping[str, bool] | None = None) -> dict[str, Any]:
    """serving: what probes said now; None: the supervisor's own view."""
    services = [] if state is None else list(state.services.items())
    return {
        "running": state is not None,
        "state_dir": str(folder.resolve()),
        "state": state.state if state is not None else "stopped",
        "addresses": state.addresses if state is not None else {},
        "services": [
            {
                "name": name,
                "state": service.state,
                "ready": (serving or {}).get(name, service.state == "ready"),
                "pid": service.pid,
                "alive": is_alive(service.pid, service.start_ticks),
                "restarts": service.restarts,
                "ports": service.ports,
                "last_exit": service.last_exit,
                "since_unix": service.since_unix,
            }
            for name, service in services
        ],
    }


def stack_table(folder: Path, state: StackState, serving: Mapping[str, bool] | None = None) -> Table:
    table = Table(title=f"stack in {folder}: {state.state}", title_justify="left")
    for column in ("service", "state", "answers", "pid", "restarts", "port", "since"):
        table.add_column(column, justify="right" if column in ("pid", "restarts", "port") else "left")
    for name, service in state.services.items():
        answers = (serving or {}).get(name, service.state == "ready")
        table.add_row(
            name,
            service.state,
            "[green]yes[/]" if answers else "[red]no[/]",
            str(service.pid or "–"),
            str(service.restarts),
            str(next(iter(service.ports.values()), "–")),
            ago(service.since_unix),
        )
    return table


def training_rate(run: RunSnapshot) -> float:
    """Tokens per second the trainer reaches while it has data: the actual rate without its waiting."""
    return run.train_rate / max(1.0 - run.wait_share, 0.01)


def five_numbers(run: RunSnapshot) -> dict[str, float]:
    """Supply, demand, what comes of the two, the share of time demand waits for supply, and what lies between them."""
    return {
        "capture_rate": run.capture_rate,
        "training_rate": training_rate(run),
        "actual_rate": run.train_rate,
        "wait_share": run.wait_share,
        "in_flight_bytes": run.in_flight_bytes,
    }


def in_flight(run: RunSnapshot) -> str:
    """Bytes in flight against the marks."""
    if not run.high_bytes:
        return human_bytes(run.in_flight_bytes)
    return f"{human_bytes(run.in_flight_bytes)} of {human_bytes(run.high_bytes)} ({run.in_flight_samples}/{run.high_samples} samples)"


def run_table(runs: Sequence[RunSnapshot]) -> Table:
    table = Table(title="runs", title_justify="left")
    for column in ("run", "state", "step", "capture", "training", "actual", "wait", "in flight", "loss"):
        table.add_column(column, justify="left" if column in ("run", "state") else "right")
    for run in runs:
        loss = run.metrics.get("loss")
        table.add_row(
            run.run_id,
            f"{run.state} ({run.reason})" if run.reason else run.state,
            f"{run.trained_steps}/{run.total_steps}",
            human_rate(run.capture_rate),
            human_rate(training_rate(run)),
            human_rate(run.train_rate),
            f"{run.wait_share:.0%}",
            in_flight(run),
            "–" if loss is None else f"{loss:.3f}",
        )
    return table


def facts_table(title: str, facts: Mapping[str, Any]) -> Table:
    """Two columns: name, value."""
    table = Table(title=title, title_justify="left", show_header=False)
    for name, value in facts.items():
        table.add_row(name, str(value))
    return table


def run_facts(run: RunSnapshot) -> dict[str, Any]:
    return {
        "state": f"{run.state} {run.reason}".strip(),
        "strategy": run.strategy,
        "target": run.target,
        "contract": run.contract_hash[:16],
        "prompt set": f"{run.prompt_set[:16]} ({run.num_prompts:,} prompts × {run.epochs} epochs)",
        "generation": run.generation,
        "steps": f"{run.trained_steps:,} of {run.total_steps:,}, checkpoint at {run.checkpoint_step:,}",
        "tokens": f"{run.captured_tokens:,} captured, {run.trained_tokens:,} trained",
        "capture rate": human_rate(run.capture_rate),
        "training rate": f"{human_rate(training_rate(run))} while it has data",
        "actual rate": human_rate(run.train_rate),
        "wait share": f"{run.wait_share:.1%}",
        "in flight": in_flight(run),
        "tasks": ", ".join(f"{name} {count:,}" for name, count in sorted(run.tasks.items()) if count) or "none",
        "metrics": ", ".join(f"{name} {value:.4g}" for name, value in sorted(run.metrics.items())) or "none yet",
        "output": run.output_dir,
    }


def fleet_table(members: Iterable[FleetMember]) -> Table:
    table = Table(title="fleet", title_justify="left")
    for column in ("id", "kind", "state", "host", "seen", "run", "contract", "reason"):
        table.add_column(column)
    for member in members:
        table.add_row(
            member.id,
            member.kind,
            member.state,
            member.host,
            ago(member.last_seen_unix_ms / 1000),
            member.run_id or "–",
            member.contract_hash[:12] or "–",
            member.reason,
        )
    return table


def checkpoint_table(run_id: str, checkpoints: Iterable[Checkpoint]) -> Table:
    table = Table(title=f"checkpoints of {run_id}", title_justify="left")
    for column in ("step", "generation", "final", "committed", "folder"):
        table.add_column(column, justify="right" if column in ("step", "generation") else "left", overflow="fold")
    for c in checkpoints:
        table.add_row(
            f"{c.step:,}",
            str(c.generation),
            "yes" if c.final else "",
            ago(c.committed_at_unix_ms / 1000),
            c.uri,
        )
    return table


def ledger_table(answer: VerifyLedgerResponse) -> Table:
    """One row per epoch: what was ingested and where it is now."""
    states = sorted({state for row in answer.rows for state, count in row.tasks.items() if count})
    table = Table(title=f"ledger of {answer.run_id}", title_justify="left")
    for column in ("epoch", "ingested", *states, "conserved"):
        table.add_column(column, justify="right")
    for row in answer.rows:
        counts = [f"{row.tasks.get(state, 0):,}" for state in states]
        table.add_row(str(row.epoch), f"{row.ingested:,}", *counts, "[green]yes[/]" if row.conserved else "[red]NO[/]")
    return table
