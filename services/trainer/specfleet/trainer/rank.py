"""One rank of a launch: `python -m specfleet.trainer.rank`, started by torch's elastic launcher (elastic.py)."""

import argparse
import os
import sys
from pathlib import Path

from specfleet.contracts.errors import EXIT_OK, SpecfleetError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--launch", type=Path, required=True, help="Launch record (JSON) written by the agent.")
    for name in ("--coordinator", "--nats", "--store", "--agent-id", "--device"):
        parser.add_argument(name, required=True)
    arguments = parser.parse_args()
    rank = int(os.environ["RANK"])
    _redirect_output(arguments.launch.parent / f"rank{rank}.log")

    import structlog

    from specfleet.telemetry import logs
    from specfleet.telemetry.process import die_with_parent

    logs.configure("trainer-rank")
    log = structlog.get_logger()
    # Set by the elastic launcher: unlike getppid() it is right even when that died meanwhile.
    launcher_pid = int(os.environ["SPECFLEET_LAUNCHER_PID"])
    die_with_parent(launcher_pid)
    from specfleet.trainer.session import Session, read_launch

    try:
        launch = read_launch(arguments.launch)
        logs.bind(run=launch.run_id, rank=rank)
        session = Session(
            launch,
            coordinator=arguments.coordinator,
            nats=arguments.nats,
            store=arguments.store,
            agent_id=arguments.agent_id,
            device=arguments.device,
        )
        outcome = session.run(rank, int(os.environ["WORLD_SIZE"]), launcher_pid)
    except SpecfleetError as error:
        log.error(error.message, code=error.code, exit_code=error.exit_code)
        sys.exit(error.exit_code)
    except Exception:
        log.exception("the rank failed unexpectedly")
        sys.exit(1)
    log.info("left", outcome=outcome)
    sys.exit(EXIT_OK)


def _redirect_output(path: Path) -> None:
    """Everything this process writes, native libraries included, goes to the rank's log."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


if __name__ == "__main__":
    main()
