"""`specctl demo`: target, stack, prompt sets, training, export, acceptance, report. One function per stage, top to bottom."""

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from specfleet.config import RunConfig, load_config
from specfleet.contracts.errors import EXIT_FAILED, EXIT_GATE_FAILED, EXIT_OK, HostError, SpecfleetError
from specfleet.ctl import gatework
from specfleet.ctl.client import WATCH_PATIENCE_S, Client
from specfleet.ctl.demo_report import DemoFacts, build_report, problems_of, render_report, write_report
from specfleet.ctl.doctor import examine
from specfleet.ctl.memory import MemoryWatch
from specfleet.ctl.output import console, print_json
from specfleet.ctl.progress import RunProgress
from specfleet.ctl.prompts import prepare_eval_set
from specfleet.ctl.stack import UpOptions, start_detached, stop
from specfleet.ctl.state import StackState, is_running, log_tail, read_state
from specfleet.ctl.submission import absolute_paths, submission
from specfleet.ctl.topology import StoreKind
from specfleet.wire.gate_pb2 import GateStatus, StartGateRequest
from specfleet.wire.run_pb2 import RunSnapshot, VerifyLedgerRequest

RUN_ID = "demo"
# What `specctl demo` wrote carries this file; only such a folder is ever replaced.
MARKER = ".made-by-specctl-demo"
LAYOUT = "sglang"
POOL_BYTES = 1 << 30
# Nothing captured, trained or changed for this long: something is stuck, and waiting longer would hide it.
STALL_S = 600.0

# A few rows, one epoch: proves that everything runs, in minutes on a busy machine.
QUICK_OVERRIDES: tuple[str, ...] = (
    "data.max_samples=16",
    "data.max_response_tokens=32",
    "trainer.epochs=1",
    "trainer.batch_size=4",
    "checkpoint.every_steps=2",
    "gate.max_rows_per_source=1",
    "gate.lossless_rows=1",
)


@dataclass
class Demo:
    """What the stages share."""

    folder: Path
    quick: bool
    store: StoreKind
    out: Console
    facts: DemoFacts = field(default_factory=DemoFacts)

    @property
    def stack_dir(self) -> Path:
        return self.folder / "stack"

    @contextlib.contextmanager
    def stage(self, title: str) -> Iterator[None]:
        """Announces a stage and records how long it took."""
        started = time.monotonic()
        self.out.print(f"[bold]{title}[/]")
        yield
        self.facts.stages_s[title] = round(time.monotonic() - started, 2)


def run_demo(output_dir: Path, *, quick: bool, store: StoreKind, as_json: bool) -> int:
    """Returns the exit code: 0, 1 (ledger not conserved) or 4 (acceptance did not rise). Other failures raise."""
    started = time.monotonic()
    demo = Demo(output_dir.resolve() / RUN_ID, quick, store, console(stderr=True))
    with demo.stage("Checking this machine"):
        _check_machine(demo)
    _claim_folder(demo.folder)
    config = _configuration(demo)
    with demo.stage("Starting bus, store, coordinator, capture, trainer and gate"):
        state = start_detached(UpOptions(demo.stack_dir, store, POOL_BYTES), with_parent=True)
    try:
        with MemoryWatch([os.getpid(), state.supervisor_pid]) as memory:
            _work(demo, config, state)
    finally:
        with demo.stage("Stopping the stack"):
            stop(demo.stack_dir)
    demo.facts.wall_s, demo.facts.peak_rss_bytes = time.monotonic() - started, memory.peak_bytes
    report = build_report(demo.facts, quick=quick)
    path = write_report(demo.folder, report)
    render_report(console(stderr=as_json), report, path)
    if as_json:
        print_json(report)
    problems = problems_of(report)
    for problem in problems:
        print(f"specctl: demo FAILED: {problem}", file=sys.stderr)
    if not problems:
        return EXIT_OK
    return EXIT_FAILED if not report["ledger"]["sound"] else EXIT_GATE_FAILED


def _check_machine(demo: Demo) -> None:
    missing = [finding for finding in examine(demo.folder, demo.store) if finding.level == "fail"]
    if missing:
        lines = "; ".join(f"{f.name}: {f.found} → {f.remedy}" for f in missing)
        raise HostError("SF-DEMO-MACHINE", f"this machine cannot run the demo: {lines}. See specctl doctor")


def _claim_folder(folder: Path) -> None:
    """Makes an empty folder. Replaces an old one only when the demo made it. Raises HostError otherwise."""
    if folder.exists():
        if is_running(folder / "stack"):
            raise HostError(
                "SF-DEMO-RUNNING",
                f"a demo already runs in {folder}; wait for it, or specctl down --state-dir {folder / 'stack'}",
            )
        if any(folder.iterdir()) and not (folder / MARKER).exists():
            raise HostError(
                "SF-DEMO-FOLDER",
                f"{folder} was not made by specctl demo and is left alone; choose another --output-dir",
            )
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    (folder / MARKER).write_text("specctl demo replaces this folder\n")


def _configuration(demo: Demo) -> RunConfig:
    from specfleet.data.demo import demo_recipe

    with demo.stage("Preparing the target"):
        overrides = (
            f"deployment.output_dir={demo.folder.parent}",
            # The table shows all rows and finished rows side by side, so the looping ones take part.
            "gate.eval_filter.finish=[stop, length]",
            *(QUICK_OVERRIDES if demo.quick else ()),
        )
        config = absolute_paths(load_config(demo_recipe(), overrides))
    return config.model_copy(update={"run_id": RUN_ID})


def _work(demo: Demo, config: RunConfig, state: StackState) -> None:
    """Everything between a running stack and its stop."""
    facts = demo.facts
    with _client(state, "coordinator") as runs, _client(state, "gate") as gates:
        with demo.stage("Preparing prompts"):
            request = submission(config, prompt_sets=demo.folder / "prompt-sets", report=demo.out.print)
            eval_set = prepare_eval_set(config, [], demo.folder / "prompt-sets")
        with demo.stage("Capturing and training"):
            runs.call(runs.runs.SubmitRun, request, timeout_s=300)
            facts.run = _watch(demo, runs)
        with demo.stage("Verifying the ledger"):
            facts.ledger = runs.call(runs.runs.VerifyLedger, VerifyLedgerRequest(run_id=RUN_ID), timeout_s=120)
        with demo.stage("Exporting the draft"):
            checkpoint = gatework.find_checkpoint(runs, RUN_ID)
            trained = gatework.export_draft(gates, facts.run, checkpoint, LAYOUT)
            untrained = gatework.export_draft(gates, facts.run, checkpoint, LAYOUT, untrained=True)
        with demo.stage("Measuring acceptance"):
            request_gate = StartGateRequest(
                run_id=RUN_ID,
                export_dir=trained.output_dir,
                target=config.model.target,
                eval_set_uri=eval_set,
                num_draft_tokens=config.gate.num_draft_tokens,
                max_rows_per_source=config.gate.max_rows_per_source,
                lossless_rows=config.gate.lossless_rows,
                lossless_new_tokens=16 if demo.quick else 0,
                baseline_export_dir=untrained.output_dir,
                output_dir=str(demo.folder / "gate"),
                require_improvement=not demo.quick,
                dtype="bfloat16",
            )
            facts.gate = gatework.run_gate(gates, request_gate, _gate_printer(demo.out))
        facts.config, facts.checkpoint, facts.export_dir, facts.eval_set = (
            config,
            checkpoint,
            trained.output_dir,
            eval_set,
        )
        stack_state = read_state(demo.stack_dir)
        if stack_state is not None:
            facts.restarts = {name: service.restarts for name, service in stack_state.services.items()}


def _client(state: StackState, service: str) -> Client:
    """Waits for a service that the supervisor is starting again."""
    return Client(state.addresses[service], patience_s=WATCH_PATIENCE_S)


def _watch(demo: Demo, runs: Client) -> RunSnapshot:
    """Follows the run to a good end. Raises SpecfleetError SF-DEMO-RUN, with log ends, for any other."""
    snapshot = RunSnapshot()
    moved_at = time.monotonic()
    last: tuple[str | int, ...] = ()
    with RunProgress(demo.out) as progress:
        for snapshot in runs.watch(RUN_ID):
            progress.update(snapshot)
            demo.facts.meter.add(time.monotonic(), snapshot)
            now = (
                snapshot.state,
                snapshot.reason,
                snapshot.captured_tokens,
                snapshot.trained_steps,
                snapshot.checkpoint_step,
            )
            if now != last:
                moved_at, last = time.monotonic(), now
            elif time.monotonic() - moved_at > STALL_S:
                raise SpecfleetError(
                    "SF-DEMO-RUN", f"nothing moved for {STALL_S:.0f} s in state {snapshot.state}{_log_ends(demo)}"
                )
    if snapshot.state not in ("SUCCEEDED", "DEGRADED"):
        raise SpecfleetError("SF-DEMO-RUN", f"the run ended {snapshot.state} ({snapshot.reason}){_log_ends(demo)}")
    return snapshot


def _log_ends(demo: Demo) -> str:
    ends = [
        f"\nend of {demo.stack_dir / 'logs' / f'{s}.log'}:\n{log_tail(demo.stack_dir, s, 8)}"
        for s in ("capture", "trainer")
    ]
    return "".join(ends)


def _gate_printer(out: Console) -> Callable[[GateStatus], None]:
    shown = ""

    def show(status: GateStatus) -> None:
        nonlocal shown
        line = f"{status.stage} {status.done}/{status.total}"
        new_stage = status.stage != shown.partition(" ")[0]
        if status.stage and line != shown and (new_stage or out.is_terminal or status.done == status.total):
            out.print(f"  {line}", markup=False)
            shown = line

    return show
