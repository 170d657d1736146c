"""specctl fleet list, sample explain, ledger verify, checkpoint list: questions to the coordinator."""

from typing import TYPE_CHECKING, Annotated

import typer

from specfleet.ctl.options import AsJson, CoordinatorAddress, RunId, StateDir

if TYPE_CHECKING:
    from rich.console import Console


def list_fleet(coordinator: CoordinatorAddress = "", state_dir: StateDir = None, as_json: AsJson = False) -> None:
    """Capture workers and trainer agents, with their state and when they were last seen."""
    from specfleet.ctl.client import Client, find_address
    from specfleet.ctl.output import emit, to_dict
    from specfleet.ctl.views import fleet_table
    from specfleet.wire.run_pb2 import ListFleetRequest

    with Client(find_address("coordinator", coordinator, state_dir)) as client:
        answer = client.call(client.runs.ListFleet, ListFleetRequest())
    emit(as_json, to_dict(answer), lambda out: out.print(fleet_table(answer.members)))


def explain_sample(
    sample: Annotated[str, typer.Argument(metavar="RUN/eEEEE-pIIIIIIIII[/aN]", help="Sample or task id.")],
    coordinator: CoordinatorAddress = "",
    state_dir: StateDir = None,
    as_json: AsJson = False,
) -> None:
    """Everything the ledger knows about one sample: its state, its attempts, its history."""
    from specfleet.contracts.errors import ConfigError
    from specfleet.contracts.ids import parse_sample_id, task_name
    from specfleet.ctl.client import Client, find_address
    from specfleet.ctl.output import emit, to_dict
    from specfleet.wire.run_pb2 import ExplainSampleRequest

    try:
        task = parse_sample_id(sample).task
    except ValueError as error:
        raise ConfigError("SF-CTL-SAMPLE-ID", str(error)) from error
    with Client(find_address("coordinator", coordinator, state_dir)) as client:
        answer = client.call(client.runs.ExplainSample, ExplainSampleRequest(task=task))

    def render(out: "Console") -> None:
        reason = f" ({answer.reason})" if answer.reason else ""
        out.print(f"{task.run_id}/{task_name(task)}: {answer.state}, attempt {answer.attempt}{reason}", markup=False)
        for line in answer.history:
            out.print(f"  {line}", markup=False, soft_wrap=True)

    emit(as_json, to_dict(answer), render)


def verify_ledger(
    run: RunId, coordinator: CoordinatorAddress = "", state_dir: StateDir = None, as_json: AsJson = False
) -> None:
    """Check the ledger's invariants for a run; exit code 1 when one is violated."""
    from specfleet.ctl.client import Client, find_address
    from specfleet.ctl.output import emit, to_dict
    from specfleet.ctl.views import ledger_table
    from specfleet.wire.run_pb2 import VerifyLedgerRequest

    with Client(find_address("coordinator", coordinator, state_dir)) as client:
        answer = client.call(client.runs.VerifyLedger, VerifyLedgerRequest(run_id=run), timeout_s=120)
    sound = answer.conserved and not answer.violations

    def render(out: "Console") -> None:
        out.print(ledger_table(answer))
        out.print(f"trained twice {answer.trained_twice}, trained never {answer.trained_never}")
        for line in answer.violations:
            out.print(f"violated: {line}", markup=False, soft_wrap=True)
        out.print("[green]the ledger is sound[/]" if sound else "[red]the ledger is NOT sound[/]")

    emit(as_json, to_dict(answer), render)
    if not sound:
        raise typer.Exit(1)


def list_checkpoints(
    run: RunId, coordinator: CoordinatorAddress = "", state_dir: StateDir = None, as_json: AsJson = False
) -> None:
    """Committed checkpoints of a run, oldest first."""
    from specfleet.ctl.client import Client, find_address
    from specfleet.ctl.output import emit, to_dict
    from specfleet.ctl.views import checkpoint_table
    from specfleet.wire.run_pb2 import ListCheckpointsRequest

    with Client(find_address("coordinator", coordinator, state_dir)) as client:
        answer = client.call(client.runs.ListCheckpoints, ListCheckpointsRequest(run_id=run))
    emit(as_json, to_dict(answer), lambda out: out.print(checkpoint_table(run, answer.checkpoints)))
