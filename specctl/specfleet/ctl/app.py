"""The commands of `specctl` and where each is implemented. Imports typer and the thin command modules, nothing heavier."""

import typer

from specfleet.ctl.commands import (
    capture,
    config,
    data,
    demo,
    doctor,
    fleet,
    gate,
    recording,
    regenerate,
    run,
    sets,
    stack,
)

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    # Plain help needs no rich, and a usage error stays a line or two.
    rich_markup_mode=None,
    # A wide terminal shows the examples' command lines whole.
    context_settings={"max_content_width": 120},
    help="Train draft models for speculative decoding and prove that they serve.",
    epilog="Exit codes: 0 ok, 1 failed, 2 bad configuration or data, 3 environment, 4 gate failed.",
)


def _group(name: str, help: str) -> typer.Typer:
    group = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help=help)
    app.add_typer(group, name=name)
    return group


app.command("up")(stack.up)
app.command("down")(stack.down)
app.command("status")(stack.status)
app.command("demo")(demo.demo)
app.command("doctor")(doctor.doctor)

_data = _group("data", "Conversations, prompt sets and feature sets.")
_data.command("prepare")(data.prepare)
_data.command("regenerate", epilog=regenerate.EXAMPLES)(regenerate.regenerate)
_data.command("capture", epilog=recording.EXAMPLES)(recording.capture)
_data.command("stats")(sets.stats)
_data.command("verify")(sets.verify)

_run = _group("run", "Training runs.")
_run.command("submit")(run.submit)
_run.command("list")(run.list_runs)
_run.command("show")(run.show)
_run.command("watch")(run.watch)
_run.command("pause")(run.pause)
_run.command("resume")(run.resume)
_run.command("cancel")(run.cancel)
_run.command("logs")(run.logs)

_fleet = _group("fleet", "Capture workers and trainer agents.")
_fleet.command("list")(fleet.list_fleet)

_capture = _group("capture", "The engine that captures.")
_capture.command("verify-engine")(capture.verify_engine)
_capture.command("patch")(capture.patch)

_sample = _group("sample", "Single samples.")
_sample.command("explain")(fleet.explain_sample)

_ledger = _group("ledger", "The ledger of tasks.")
_ledger.command("verify")(fleet.verify_ledger)

_checkpoint = _group("checkpoint", "Committed checkpoints.")
_checkpoint.command("list")(fleet.list_checkpoints)

app.command("export")(gate.export)
_gate = _group("gate", "Does the exported draft serve, and how well?")
_gate.command("run")(gate.run_gate)
_gate.command("show")(gate.show_gate)

_config = _group("config", "The run configuration.")
_config.command("schema")(config.schema)
_config.command("check")(config.check)
