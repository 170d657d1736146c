"""specctl demo."""

from pathlib import Path
from typing import Annotated

import typer

from specfleet.ctl.options import AsJson
from specfleet.ctl.topology import StoreKind


def demo(
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="A few rows and one epoch: proves that everything runs, not that the draft is good."
        ),
    ] = False,
    output_dir: Annotated[Path, typer.Option("--output-dir", help="Where runs/demo is written.")] = Path("runs"),
    store: Annotated[StoreKind, typer.Option("--store", help="Where features live.")] = "mooncake",
    as_json: AsJson = False,
) -> None:
    """Train a real draft for a real target on this machine, and prove it in decoding.

    Leaves runs/demo/report.json. Exit code 4 when acceptance did not rise, 1 when the ledger is not conserved.
    """
    from specfleet.ctl.demo import run_demo

    raise typer.Exit(run_demo(output_dir, quick=quick, store=store, as_json=as_json))
