"""Runs the local ranks of one launch under torch's elastic launcher: `python -m specfleet.trainer.elastic`.

A process of its own, so that the agent stays small and outlives any crash of a rank. It dies with the agent, and its
ranks die with it. Ranks are never restarted here: the coordinator makes a new launch, which opens a new generation.
"""

import argparse
import os
import sys
from collections import deque
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from specfleet.telemetry.process import die_with_parent

if TYPE_CHECKING:
    from specfleet.wire.trainer_pb2 import Launch

# Longer than a rank's own grace (stop.STOP_GRACE_S), so that a rank is killed only when it is truly stuck.
_SHUTDOWN_S = 60
# Nodes of one launch start within a heartbeat of one another; past this something is wrong with a node.
_RENDEZVOUS_S = 600
LOG_LINES = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--launch", type=Path, required=True)
    parser.add_argument("--agent-pid", type=int, required=True)
    arguments, rank_arguments = parser.parse_known_args()
    die_with_parent(arguments.agent_pid)
    os.environ["SPECFLEET_LAUNCHER_PID"] = str(os.getpid())

    from google.protobuf.json_format import Parse

    from specfleet.wire.trainer_pb2 import Launch

    launch = Parse(arguments.launch.read_text(), Launch())
    sys.exit(_run(launch, arguments.launch, rank_arguments))


def _run(launch: "Launch", path: Path, rank_arguments: list[str]) -> int:
    """Blocks until every local rank has exited. Returns 0, or the exit code of the first rank that failed."""
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    alone = not launch.rendezvous
    if alone:
        # One node: nothing listens or connects outside loopback.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    scratch = TemporaryDirectory(prefix="specfleet-elastic-")
    config = LaunchConfig(
        min_nodes=max(1, launch.nnodes),
        max_nodes=max(1, launch.nnodes),
        nproc_per_node=max(1, launch.nproc_per_node),
        run_id=launch.launch_id,
        role="trainer",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0" if alone else launch.rendezvous,
        rdzv_configs={"is_host": alone or launch.node_rank == 0, "timeout": _RENDEZVOUS_S},
        max_restarts=0,
        # Ranks write their own logs; this is for torch's bookkeeping.
        logs_specs=DefaultLogsSpecs(log_dir=scratch.name),
        local_addr="127.0.0.1" if alone else None,
        shutdown_timeout=_SHUTDOWN_S,
    )
    command = ["-m", "specfleet.trainer.rank", "--launch", str(path), *rank_arguments]
    try:
        elastic_launch(config, sys.executable)(*command)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        print(f"rank {rank} ended with exit code {failure.exitcode}; the end of its log:", file=sys.stderr)
        print(tail(path.parent / f"rank{rank}.log"), file=sys.stderr, flush=True)
        # A signal's number is negative here; a shell's convention keeps it positive.
        return int(failure.exitcode) if failure.exitcode > 0 else 128 - int(failure.exitcode)
    except SignalException as error:
        return 128 + int(error.sigval)
    finally:
        scratch.cleanup()
    return 0


def tail(path: Path, lines: int = LOG_LINES) -> str:
    """The last lines of a log; empty when there is none."""
    try:
        with path.open(errors="replace") as file:
            return "".join(deque(file, maxlen=lines)).strip()
    except OSError:
        return ""


if __name__ == "__main__":
    main()
