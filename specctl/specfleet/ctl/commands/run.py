"""specctl run submit, list, show, watch, pause, resume, cancel, logs."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specfleet.ctl.options import AsJson, CoordinatorAddress, Overrides, RunId, StateDir

if TYPE_CHECKING:
    from rich.console import Console

    from specfleet.wire.run_pb2 import RunSnapshot


def _show(as_json: bool, run: "RunSnapshot") -> None:
    from specfleet.ctl.output import emit, to_dict
    from specfleet.ctl.views import facts_table, five_numbers, run_facts

    document = to_dict(run) | {"five_numbers": five_numbers(run)}
    emit(as_json, document, lambda out: out.print(facts_table(run.run_id, run_facts(run))))


def submit(
    path: Annotated[Path, typer.Argument(metavar="RUN.yaml", help="Run configuration.")],
    overrides: Overrides = None,
    run_id: Annotated[str, typer.Option("--run-id", help="Name of the run; generated when left out.")] = "",
    watch_it: Annotated[bool, typer.Option("--watch", help="Watch the run until it ends.")] = False,
    coordinator: CoordinatorAddress = "",
    state_dir: StateDir = None,
    as_json: AsJson = False,
) -> None:
    """Check a configuration, prepare its prompt set, and hand the run to the coordinator."""
    from specfleet.ctl.client import Client, find_address
    from specfleet.ctl.output import say
    from specfleet.ctl.submission import build_submission

    # The address first: preparing data for a coordinator that is not there would waste minutes.
    address = find_address("coordinator", coordinator, state_dir)
    request = build_submission(path, overrides or [], run_id, report=say)
    with Client(address) as client:
        run = client.call(client.runs.SubmitRun, request, timeout_s=300).run
    if watch_it:
        watch(run.run_id, coordinator=address, as_json=as_json)
    else:
        _show(as_json, run)


def list_runs(coordinator: CoordinatorAddress = "", state_dir: StateDir = None, as_json: AsJson = False) -> None:
    """All runs with their five numbers."""
    from specfleet.ctl.client import Client, find_address
    from specfleet.ctl.output import emit, to_dict
    from specfleet.ctl.views import run_table
    from specfleet.wire.run_pb2 import ListRunsRequest

    with Client(find_address("coordinator", coordinator, state_dir)) as client:
        answer = client.call(client.runs.ListRuns, ListRunsRequest())
    emit(as_json, to_dict(answer), lambda out: out.print(run_table(list(answer.runs))))


def show(run: RunId, coordinator: CoordinatorAddress = "", state_dir: StateDir = None, as_json: AsJson = False) -> None:
    """One run in full."""
    from specfleet.ctl.client import Client, find_address
    from specfleet.wire.run_pb2 import GetRunRequest

    with Client(find_address("coordinator", coordinator, state_dir)) as client:
        _show(as_json, client.call(client.runs.GetRun, GetRunRequest(run_id=run)).run)


def watch(
    run: RunId,
    interval: Annotated[float, typer.Option("--interval", min=0.1, help="Seconds between snapshots.")] = 1.0,
    coordinator: CoordinatorAddress = "",
    state_dir: StateDir = None,
    as_json: AsJson = False,
) -> None:
    """Follow a run to its end: capture, training and actual rate, wait share, bytes in flight, loss. 1 when it failed.

    With --json: one JSON document per snapshot and line.
    """
    from specfleet.ctl.client import Client, find_address
    from specfleet.ctl.output import print_json, to_dict
    from specfleet.ctl.progress import RunProgress
    from specfleet.ctl.views import five_numbers

    snapshot = None
    with Client(find_address("coordinator", coordinator, state_dir)) as client:
        if as_json:
            for snapshot in client.watch(run, interval):
                print_json(to_dict(snapshot) | {"five_numbers": five_numbers(snapshot)})
        else:
            with RunProgress() as progress:
                for snapshot in client.watch(run, interval):
                    progress.update(snapshot)
    if snapshot is None or snapshot.state in ("FAILED", "CANCELLED"):
        raise typer.Exit(1)


def pause(
    run: RunId, coordinator: CoordinatorAddress = "", state_dir: StateDir = None, as_json: AsJson = False
) -> None:
    """Finish the step, write a checkpoint, and hold the run."""
    from specfleet.ctl.client import Client, find_address
    from specfleet.wire.run_pb2 import PauseRunRequest

    with Client(find_address("coordinator", coordinator, state_dir)) as client:
        _show(as_json, client.call(client.runs.PauseRun, PauseRunRequest(run_id=run)).run)


def resume(
    run: RunId,
    config: Annotated[
        Path | None, typer.Option("--config", help="A configuration that must agree with the run's recorded identity.")
    ] = None,
    coordinator: CoordinatorAddress = "",
    state_dir: StateDir = None,
    as_json: AsJson = False,
) -> None:
    """Let a paused run go on from its newest checkpoint."""
    from specfleet.config import dump_config, load_config
    from specfleet.ctl.client import Client, find_address
    from specfleet.ctl.submission import absolute_paths
    from specfleet.wire.run_pb2 import ResumeRunRequest

    text = dump_config(absolute_paths(load_config(config))) if config else ""
    with Client(find_address("coordinator", coordinator, state_dir)) as client:
        _show(as_json, client.call(client.runs.ResumeRun, ResumeRunRequest(run_id=run, config_yaml=text)).run)


def cancel(
    run: RunId, coordinator: CoordinatorAddress = "", state_dir: StateDir = None, as_json: AsJson = False
) -> None:
    """End a run for good and drop what it has in flight."""
    from specfleet.ctl.client import Client, find_address
    from specfleet.wire.run_pb2 import CancelRunRequest

    with Client(find_address("coordinator", coordinator, state_dir)) as client:
        _show(as_json, client.call(client.runs.CancelRun, CancelRunRequest(run_id=run)).run)


def logs(
    run: RunId,
    rank: Annotated[int, typer.Option("--rank", min=0, help="Rank of the trainer.")] = 0,
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, help="Lines from the end.")] = 50,
    coordinator: CoordinatorAddress = "",
    state_dir: StateDir = None,
    as_json: AsJson = False,
) -> None:
    """The end of a rank's log (read from the run's folder, so on the trainer's machine or a shared file system)."""
    from specfleet.contracts.errors import DataError
    from specfleet.ctl.client import Client, find_address
    from specfleet.ctl.output import emit
    from specfleet.wire.run_pb2 import GetRunRequest

    with Client(find_address("coordinator", coordinator, state_dir)) as client:
        snapshot = client.call(client.runs.GetRun, GetRunRequest(run_id=run)).run
    path = Path(snapshot.output_dir) / "logs" / f"rank{rank}.log"
    try:
        text = path.read_text(errors="replace").splitlines()[-lines:]
    except OSError as error:
        raise DataError("SF-CTL-NO-LOG", f"no log of rank {rank} of run {run}: {path}: {error.strerror}") from error

    def render(out: "Console") -> None:
        for line in text:
            out.print(line, markup=False, soft_wrap=True)

    emit(as_json, {"run_id": run, "rank": rank, "path": str(path), "lines": text}, render)
