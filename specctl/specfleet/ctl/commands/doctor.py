"""specctl doctor."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from specfleet.ctl.options import AsJson, StateDir
from specfleet.ctl.topology import StoreKind

if TYPE_CHECKING:
    from rich.console import Console


def doctor(
    state_dir: StateDir = None,
    store: Annotated[StoreKind, typer.Option("--store", help="Which store the stack would use.")] = "mooncake",
    as_json: AsJson = False,
) -> None:
    """Say what this machine lacks for the embedded stack, and what to do. Exit code 3 when something is missing."""
    from specfleet.ctl.doctor import examine
    from specfleet.ctl.output import emit
    from specfleet.ctl.state import default_state_dir

    findings = examine(state_dir or default_state_dir(), store)
    healthy = all(finding.level != "fail" for finding in findings)

    def render(out: "Console") -> None:
        from rich.table import Table

        colours = {"ok": "green", "warn": "yellow", "fail": "red", "info": "blue"}
        table = Table(show_header=True)
        for column in ("", "check", "found", "what to do"):
            table.add_column(column, overflow="fold")
        for finding in findings:
            level = f"[{colours[finding.level]}]{finding.level}[/]"
            table.add_row(level, finding.name, finding.found.replace("[", r"\["), finding.remedy.replace("[", r"\["))
        out.print(table)
        out.print("ready: try specctl demo" if healthy else "the embedded stack cannot run yet", style="bold")

    emit(as_json, {"healthy": healthy, "findings": [asdict(finding) for finding in findings]}, render)
    if not healthy:
        raise typer.Exit(3)
