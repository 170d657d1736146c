"""`specctl`. Heavy libraries are imported by the commands that need them, so that --help answers at once."""

import json
import os
import sys
from typing import Any, NoReturn

import typer

from specfleet.contracts.errors import ConfigError, SpecfleetError

# typer brings a click of its own; this is its class of wrong command lines, wherever it lives.
UsageError: Any = typer.BadParameter.__base__


def main() -> None:
    """Runs the command line; an expected error is one line on stderr (and one JSON document with --json) and an exit code."""
    from specfleet.ctl.app import app

    try:
        sys.exit(app(prog_name="specctl", standalone_mode=False))
    except SpecfleetError as error:
        _end(error)
    except UsageError as error:
        message = error.format_message()
        if error.ctx is None or message == error.ctx.get_help():  # a group without a command
            print(message, file=sys.stderr)
            sys.exit(error.exit_code)
        line = " ".join(message.split())
        stop = "" if line.endswith((".", "?")) else "."
        _end(ConfigError("SF-CTL-USAGE", f"{line}{stop} Try {error.ctx.command_path} --help"))
    except BrokenPipeError:
        # The reader (head, less) has gone; keep the interpreter from complaining while it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)


def _end(error: SpecfleetError) -> NoReturn:
    if "--json" in sys.argv:
        document = {"code": error.code, "message": error.message, "exit_code": error.exit_code}
        print(json.dumps({"error": document}, ensure_ascii=False))
    print(f"specctl: {error}", file=sys.stderr)
    sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
