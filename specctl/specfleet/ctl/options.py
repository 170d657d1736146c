"""Options that many commands share, as annotated types."""

from pathlib import Path
from typing import Annotated

import typer

AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout instead of text.")]
StateDir = Annotated[
    Path | None,
    typer.Option(
        "--state-dir", envvar="SPECFLEET_STATE", help="State folder of the embedded stack (default: .specfleet)."
    ),
]
CoordinatorAddress = Annotated[
    str,
    typer.Option(
        "--coordinator",
        envvar="SPECFLEET_COORDINATOR",
        help="HOST:PORT (default: the embedded stack's).",
        show_default=False,
    ),
]
GateAddress = Annotated[
    str,
    typer.Option(
        "--gate", envvar="SPECFLEET_GATE", help="HOST:PORT (default: the embedded stack's).", show_default=False
    ),
]
SglangPython = Annotated[
    str,
    typer.Option(
        "--sglang-python",
        envvar="SPECFLEET_SGLANG_PYTHON",
        help="Interpreter that has SGLang (default: this one if it has, else .venv-sglang of the checkout).",
        show_default=False,
    ),
]
RunId = Annotated[str, typer.Argument(metavar="RUN", help="Run id.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("-s", "--set", metavar="a.b=v", help="Override a key of the configuration; repeatable."),
]
