"""specctl capture verify-engine, patch."""

import json
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from specfleet.contracts.errors import EXIT_ENVIRONMENT, EXIT_FAILED, HostError
from specfleet.ctl.options import AsJson
from specfleet.ctl.output import emit

if TYPE_CHECKING:
    from rich.console import Console


Python = Annotated[
    str,
    typer.Option(
        "--python",
        envvar="SPECFLEET_SGLANG_PYTHON",
        help="Interpreter that has SGLang (default: this one if it has, else .venv-sglang of the checkout).",
        show_default=False,
    ),
]


def verify_engine(python: Python = "", as_json: AsJson = False) -> None:
    """Compare the installed SGLang with the one the capture plugin was tested with; exit code 1 when it differs.

    Each hooked function must have the tested signature and source. A capture server checks the same before it starts.
    """
    from specfleet.sglang.interpreter import find_python

    rows = _measure(find_python(python))
    emit(as_json, rows, lambda console: _render(console, rows))
    if not all(row["ok"] for row in rows):
        raise typer.Exit(EXIT_FAILED)


def patch(
    action: Annotated[Literal["show", "apply", "verify", "revert"], typer.Argument(help="What to do.")] = "show",
    python: Python = "",
    package: Annotated[
        Path | None,
        typer.Option(
            "--sglang",
            metavar="DIR",
            help="The directory of the package instead, in an unpacked image.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Call the capture plugin from SGLang's own source, for images in which SGLang finds no entry points.

    show prints the patch for `patch -p1` or `git apply`; verify exits with 1 unless it is applied. Each refuses a file whose
    sha256 is neither that of a tested release nor the patched one.
    """
    from specfleet.ctl.output import say
    from specfleet.sglang import patch as sglang_patch
    from specfleet.sglang.interpreter import find_python, package_dir

    folder = package or package_dir(find_python(python))
    if action == "show":
        typer.echo(sglang_patch.unified_diff(folder), nl=False)
    elif action == "verify":
        patched = sglang_patch.is_patched(folder)
        say(f"{folder} is {'patched' if patched else 'as released'}")
        raise typer.Exit(0 if patched else EXIT_FAILED)
    else:
        changed = sglang_patch.apply(folder) if action == "apply" else sglang_patch.revert(folder)
        state = "patched" if action == "apply" else "as released"
        say(f"{folder} is {state}{'' if changed else ', and was before'}")


def _measure(python: str) -> list[dict[str, Any]]:
    """Asked of the interpreter itself: it must find both SGLang and the plugin."""
    done = subprocess.run(
        [python, "-m", "specfleet.capture.sglang_plugin.versions"], capture_output=True, text=True, check=False
    )
    if done.returncode == EXIT_ENVIRONMENT:
        code, _, message = done.stderr.strip().removeprefix("[").partition("] ")
        raise HostError(code, message)
    if done.returncode != 0:
        raise HostError("SF-SGLANG-PLUGIN", f"{python} cannot import the capture plugin: {done.stderr.strip()[-500:]}")
    try:
        rows: list[dict[str, Any]] = json.loads(done.stdout)
    except ValueError as error:
        raise HostError("SF-SGLANG-PYTHON", f"{python} is not a Python interpreter: it answers otherwise") from error
    return rows


def _render(console: "Console", rows: list[dict[str, Any]]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for name in ("symbol", "expected", "found", "ok"):
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(
            *(Text(row[name]) for name in ("symbol", "expected", "found")),
            Text("yes") if row["ok"] else Text("NO", "bold"),
        )
    console.print(table)
