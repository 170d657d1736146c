"""specctl up, down, status: the embedded stack on one machine."""

import re
from typing import TYPE_CHECKING, Annotated

import typer

from specfleet.ctl.options import AsJson, CoordinatorAddress, StateDir
from specfleet.ctl.topology import EngineName, StoreKind

if TYPE_CHECKING:
    from rich.console import Console

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def parse_bytes(text: str) -> int:
    """'512M', '1.5GiB', '1073741824' → bytes (powers of 1024)."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]?)(?:i?b)?", text.strip(), re.IGNORECASE)
    number = int(float(match[1]) * _UNITS[match[2].lower()]) if match else 0
    if number <= 0:
        raise typer.BadParameter(f"{text!r} is not a size; write bytes, or a number with K, M or G, as in 512M")
    return number


def parse_ports(items: list[str] | None) -> dict[str, int]:
    """['coordinator=7070'] → {'coordinator': 7070}."""
    ports = {}
    for item in items or []:
        name, _, number = item.partition("=")
        if not (name and number.isascii() and number.isdigit() and 0 < int(number) < 65536):
            raise typer.BadParameter(f"{item!r} is not NAME=NUMBER with a port from 1 to 65535, as in coordinator=7070")
        ports[name] = int(number)
    return ports


def up(
    detach: Annotated[
        bool, typer.Option("--detach", help="Return once everything is ready; stop it with specctl down.")
    ] = False,
    state_dir: StateDir = None,
    store: Annotated[
        StoreKind, typer.Option("--store", help="Where features live: Mooncake, or files in a directory.")
    ] = "mooncake",
    pool: Annotated[str, typer.Option("--pool", help="Size of the feature pool.")] = "1G",
    engine: Annotated[
        EngineName,
        typer.Option("--engine", help="What captures: hf (transformers), or sglang. Runs name it as capture.engine."),
    ] = "hf",
    slots: Annotated[
        int,
        typer.Option(
            "--slots", min=0, help="Ranks the trainer runs at a time; 0: one per GPU, or 1. Small drafts share a GPU."
        ),
    ] = 0,
    port: Annotated[
        list[str] | None, typer.Option("--port", metavar="NAME=N", help="Fix a port; others are chosen by the system.")
    ] = None,
    ready_fd: Annotated[int, typer.Option("--ready-fd", hidden=True)] = -1,
    with_parent: Annotated[int, typer.Option("--with-parent", hidden=True)] = 0,
    as_json: AsJson = False,
) -> None:
    """Start bus, store, coordinator, capture, trainer and gate on this machine, on loopback."""
    from specfleet.contracts.errors import SpecfleetError
    from specfleet.ctl.output import emit, say
    from specfleet.ctl.stack import UpOptions, answer_starter, serve, start_detached
    from specfleet.ctl.state import StackState, default_state_dir
    from specfleet.ctl.views import stack_document, stack_table

    folder = state_dir or default_state_dir()
    options = UpOptions(folder, store, parse_bytes(pool), engine, parse_ports(port), slots)

    def ready(state: StackState) -> None:
        if ready_fd >= 0:
            answer_starter(ready_fd, None)
        else:
            emit(as_json, stack_document(folder, state), lambda out: out.print(stack_table(folder, state)))

    if detach:
        ready(start_detached(options))
        return
    if with_parent:
        from specfleet.telemetry.process import die_with_parent

        die_with_parent(with_parent)
    answered = False

    def ready_once(state: StackState) -> None:
        nonlocal answered
        answered = True
        ready(state)

    try:
        serve(options, report=say, on_ready=ready_once)
    except SpecfleetError as error:
        if ready_fd >= 0 and not answered:
            answer_starter(ready_fd, error)
        raise


def down(
    state_dir: StateDir = None,
    timeout: Annotated[float, typer.Option("--timeout", min=0.0, help="Seconds to wait for an ordered stop.")] = 180.0,
    as_json: AsJson = False,
) -> None:
    """Stop the embedded stack in order: trainer first, so that it writes its checkpoint."""
    from specfleet.ctl.output import emit
    from specfleet.ctl.stack import stop
    from specfleet.ctl.state import default_state_dir

    folder = state_dir or default_state_dir()
    stopped = stop(folder, timeout)
    text = f"stopped the stack in {folder}" if stopped else f"no stack runs in {folder}"
    emit(as_json, {"stopped": stopped, "state_dir": str(folder)}, lambda out: out.print(text))


def status(state_dir: StateDir = None, coordinator: CoordinatorAddress = "", as_json: AsJson = False) -> None:
    """Services (pid, restarts, port, ready) and runs (the five numbers) at a glance."""
    from specfleet.contracts.errors import HostError
    from specfleet.ctl.client import Client, find_address
    from specfleet.ctl.output import emit, to_dict
    from specfleet.ctl.state import is_running, read_state, running_state_dir
    from specfleet.ctl.views import probe_stack, run_table, stack_document, stack_table
    from specfleet.wire.run_pb2 import ListRunsRequest

    folder = running_state_dir(state_dir)
    state = read_state(folder) if is_running(folder) else None
    serving = probe_stack(state) if state is not None else {}
    address = find_address("coordinator", coordinator, folder)
    try:
        with Client(address) as client:
            runs = list(client.call(client.runs.ListRuns, ListRunsRequest(), timeout_s=5).runs)
    except HostError:
        # The services are worth showing even while the coordinator starts again.
        if state is None:
            raise
        runs = None
    document = stack_document(folder, state, serving)
    document["runs"] = None if runs is None else [to_dict(run) for run in runs]

    def render(out: "Console") -> None:
        if state is not None:
            out.print(stack_table(folder, state, serving))
        if runs is None:
            out.print(f"coordinator {address} does not answer")
        elif runs:
            out.print(run_table(runs))
        else:
            out.print("no runs yet")

    emit(as_json, document, render)
    if state is not None and (state.state != "ready" or not all(serving.values())):
        raise typer.Exit(3)
