"""specctl demo."""

from pathlib import Path
from typing import Annotated

import typer

from specfleet.ctl.options import AsJson


def demo(
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="A few rows and one epoch: proves that everything runs, not that the draft is good."
        ),
    ] = False,
    output_dir: Annotated[Path, typer.Option("--output-dir", help="Where runs/demo is written.")] = Path("runs"),
    store: Annotated[str, typer.Option("--store", help="mooncake or directory.")] = "mooncake",
    as_json: AsJson = False,
) -> None:
    """Train a real draft for a real target on this machine, and prove it in decoding.

    Leaves runs/demo/report.json. Exit code 4 when acceptance did not rise, 1 when the ledger is not conserved.
    """
    from specfleet.ctl.demo import run_demo

    if store not in ("mooncake", "directory"):
        raise typer.BadParameter(f"--store {store!r} is neither mooncake nor directory")
    code = run_demo(output_dir, quick=quick, store="directory" if store == "directory" else "mooncake", as_json=as_json)
    raise typer.Exit(code)
