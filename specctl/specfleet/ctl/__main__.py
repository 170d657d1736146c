"""`specctl`. Heavy libraries are imported by the commands that need them, so that --help answers at once."""

import json
import os
import sys

from specfleet.contracts.errors import SpecfleetError


def main() -> None:
    """Runs the command line; an expected error is one line on stderr (and one JSON document with --json) and an exit code."""
    from specfleet.ctl.app import app

    try:
        app(prog_name="specctl")
    except SpecfleetError as error:
        if "--json" in sys.argv:
            document = {"code": error.code, "message": error.message, "exit_code": error.exit_code}
            print(json.dumps({"error": document}, ensure_ascii=False))
        print(f"specctl: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        # The reader (head, less) has gone; keep the interpreter from complaining while it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)


if __name__ == "__main__":
    main()
