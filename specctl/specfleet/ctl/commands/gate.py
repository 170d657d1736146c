"""specctl export; gate run, show."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from specfleet.ctl.options import AsJson, CoordinatorAddress, GateAddress, RunId, StateDir

if TYPE_CHECKING:
    from rich.console import Console

    from specfleet.wire.gate_pb2 import GateStatus

Layout = Annotated[
    str,
    typer.Option(
        "--layout",
        help="Serving engine's layout: sglang or vllm. Default: what serves the strategy, SGLang where both do.",
        show_default=False,
    ),
]
Step = Annotated[
    int | None, typer.Option("--checkpoint", metavar="STEP", help="Default: the newest.", show_default=False)
]


def export(
    run: RunId,
    layout: Layout = "",
    checkpoint: Step = None,
    output: Annotated[
        str, typer.Option("--output", help="Default: exports/LAYOUT in the run's folder.", show_default=False)
    ] = "",
    untrained: Annotated[
        bool, typer.Option("--untrained", help="Fresh weights: the baseline of a comparison.")
    ] = False,
    coordinator: CoordinatorAddress = "",
    gate: GateAddress = "",
    state_dir: StateDir = None,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint as a Hugging Face directory that a serving engine loads."""
    from specfleet.ctl import gatework
    from specfleet.ctl.client import Client, find_address
    from specfleet.ctl.output import emit, to_dict

    folder = str(Path(output).resolve()) if output else ""
    with (
        Client(find_address("coordinator", coordinator, state_dir)) as runs,
        Client(find_address("gate", gate, state_dir)) as gates,
    ):
        snapshot = gatework.get_run(runs, run)
        source = gatework.find_checkpoint(runs, run, checkpoint)
        answer = gatework.export_draft(gates, snapshot, source, layout, untrained=untrained, output_dir=folder)

    def render(out: "Console") -> None:
        out.print(
            f"step {source.step} of {run} → {answer.output_dir} (weights {answer.weights_hash[:16]})", markup=False
        )
        for file in answer.files:
            out.print(f"  {file}", markup=False)

    emit(as_json, to_dict(answer) | {"step": source.step}, render)


def run_gate(
    run: RunId,
    eval_files: Annotated[
        list[str] | None,
        typer.Option("--eval", metavar="FILE", help="Held-out conversations; default: the run's gate.eval."),
    ] = None,
    eval_set: Annotated[
        str, typer.Option("--eval-set", metavar="DIR", help="A prepared prompt set instead of --eval.")
    ] = "",
    layout: Layout = "",
    checkpoint: Step = None,
    num_draft_tokens: Annotated[
        int, typer.Option("--draft-tokens", min=0, help="Per round; 0: the run's gate section.")
    ] = 0,
    max_rows: Annotated[
        int, typer.Option("--max-rows", min=-1, help="Rows per source; -1: the run's gate section, 0: all.")
    ] = -1,
    lossless_rows: Annotated[
        int, typer.Option("--lossless-rows", min=-1, help="Rows decoded in full; -1: the run's gate section.")
    ] = -1,
    temperature: Annotated[
        float,
        typer.Option(
            "--temperature", min=-1, help="Decode those rows once more, sampled; 0: no. -1: the run's gate section."
        ),
    ] = -1.0,
    top_k: Annotated[
        int, typer.Option("--top-k", min=-1, help="Sample from the likeliest only; 0: all. -1: the run's gate section.")
    ] = -1,
    top_p: Annotated[
        float, typer.Option("--top-p", min=0, max=1, help="Likewise, by probability. 0: the run's gate section.")
    ] = 0.0,
    acceptance_rule: Annotated[
        Literal["rejection", "target_only"] | None,
        typer.Option("--rule", help="How sampled guesses are verified; default: the run's gate section."),
    ] = None,
    serve: Annotated[
        Literal["sglang"] | None,
        typer.Option(
            "--serve", help="Serve held-out prompts with this engine and draft, and compare with the reference decoder."
        ),
    ] = None,
    serve_rows: Annotated[int, typer.Option("--serve-rows", min=1, help="Rows per source that are served.")] = 1,
    serve_tokens: Annotated[int, typer.Option("--serve-tokens", min=2, help="New tokens per served row.")] = 32,
    baseline: Annotated[
        bool, typer.Option("--baseline/--no-baseline", help="Compare with an untrained export.")
    ] = True,
    coordinator: CoordinatorAddress = "",
    gate: GateAddress = "",
    state_dir: StateDir = None,
    as_json: AsJson = False,
) -> None:
    """Export, decode held-out rows with the draft, compare with the target's own output. Exit code 4 when it does not pass."""
    from specfleet.config import parse_config
    from specfleet.ctl import gatework
    from specfleet.ctl.client import Client, find_address
    from specfleet.ctl.output import say
    from specfleet.ctl.prompts import prepare_eval_set
    from specfleet.wire.gate_pb2 import StartGateRequest

    if eval_files and eval_set:
        raise typer.BadParameter("--eval and --eval-set both name held-out rows; give one of them")
    with (
        Client(find_address("coordinator", coordinator, state_dir)) as runs,
        Client(find_address("gate", gate, state_dir)) as gates,
    ):
        snapshot = gatework.get_run(runs, run)
        config = parse_config(snapshot.config_yaml, f"configuration of run {run}")
        source = gatework.find_checkpoint(runs, run, checkpoint)
        rows = eval_set or prepare_eval_set(config, eval_files or [])
        trained = gatework.export_draft(gates, snapshot, source, layout)
        untrained = gatework.export_draft(gates, snapshot, source, layout, untrained=True) if baseline else None
        request = StartGateRequest(
            run_id=run,
            temperature=config.gate.temperature if temperature < 0 else temperature,
            top_k=config.gate.top_k if top_k < 0 else top_k,
            top_p=top_p or config.gate.top_p,
            acceptance_rule=acceptance_rule or config.gate.acceptance_rule,
            export_dir=trained.output_dir,
            target=config.model.target,
            eval_set_uri=str(Path(rows).resolve()),
            num_draft_tokens=num_draft_tokens or config.gate.num_draft_tokens,
            max_rows_per_source=config.gate.max_rows_per_source if max_rows < 0 else max_rows,
            lossless_rows=config.gate.lossless_rows if lossless_rows < 0 else lossless_rows,
            baseline_export_dir=untrained.output_dir if untrained else "",
            output_dir=str(Path(snapshot.output_dir) / "gate"),
            require_improvement=baseline,
            serve_engine=serve or "",
            serve_rows=serve_rows,
            serve_new_tokens=serve_tokens,
            dtype=config.model.dtype,
        )
        status = gatework.run_gate(gates, request, _progress(say))
    _show(status, as_json)


def show_gate(
    gate_id: Annotated[str, typer.Argument(metavar="GATE", help="Gate id.")],
    gate: GateAddress = "",
    state_dir: StateDir = None,
    as_json: AsJson = False,
) -> None:
    """State or report of a gate job."""
    from specfleet.ctl.client import Client, find_address
    from specfleet.wire.gate_pb2 import GetGateRequest

    with Client(find_address("gate", gate, state_dir)) as gates:
        status = gates.call(gates.gate.GetGate, GetGateRequest(gate_id=gate_id)).status
    _show(status, as_json)


def _progress(say: Any) -> Any:
    stage = ""

    def show(status: "GateStatus") -> None:
        nonlocal stage
        if status.stage != stage:
            stage = status.stage
            say(f"gate {status.gate_id}: {stage or status.state} ({status.done}/{status.total})")

    return show


def _show(status: "GateStatus", as_json: bool) -> None:
    from specfleet.ctl.acceptance import acceptance_table
    from specfleet.ctl.gatework import report_of
    from specfleet.ctl.output import emit, to_dict
    from specfleet.ctl.views import facts_table

    report = report_of(status)

    def render(out: "Console") -> None:
        facts = {"state": status.state, "run": status.run_id, "stage": status.stage, "message": status.message}
        out.print(facts_table(f"gate {status.gate_id}", {name: value for name, value in facts.items() if value}))
        if report:
            out.print(acceptance_table(report["acceptance_length"]))
            for check in report["checks"]:
                out.print(f"{check['result']} {check['name']}: {check['detail']}", markup=False, soft_wrap=True)

    document = to_dict(status)
    document.pop("report_json")
    emit(as_json, document | {"report": report}, render)
    if status.state == "FAIL":
        raise typer.Exit(4)
    if status.state == "ERROR":
        raise typer.Exit(1)
