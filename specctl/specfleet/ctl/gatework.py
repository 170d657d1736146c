"""Export and gate as a client sees them: which checkpoint, which folders, and following a gate job to its end."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc

from specfleet.config.serving import default_layout
from specfleet.contracts.errors import ConfigError, SpecfleetError
from specfleet.ctl.client import WATCH_PATIENCE_S, Client
from specfleet.rpc.errors import from_rpc
from specfleet.wire.gate_pb2 import (
    ExportDraftRequest,
    ExportDraftResponse,
    GateStatus,
    StartGateRequest,
    WatchGateRequest,
)
from specfleet.wire.run_pb2 import Checkpoint, GetRunRequest, ListCheckpointsRequest, RunSnapshot

TERMINAL_GATE_STATES = ("PASS", "FAIL", "ERROR")
# Reading, converting and hashing a draft of a few GB.
EXPORT_TIMEOUT_S = 600.0


def get_run(coordinator: Client, run_id: str) -> RunSnapshot:
    return coordinator.call(coordinator.runs.GetRun, GetRunRequest(run_id=run_id)).run


def find_checkpoint(coordinator: Client, run_id: str, step: int | None = None) -> Checkpoint:
    """The committed checkpoint of a step, or the newest. Raises ConfigError SF-CTL-NO-CHECKPOINT naming those there are."""
    answer = coordinator.call(coordinator.runs.ListCheckpoints, ListCheckpointsRequest(run_id=run_id))
    committed = {c.step: c for c in answer.checkpoints}
    if not committed:
        raise ConfigError("SF-CTL-NO-CHECKPOINT", f"run {run_id} has no committed checkpoint yet")
    if step is not None and step not in committed:
        there = ", ".join(str(number) for number in sorted(committed))
        raise ConfigError(
            "SF-CTL-NO-CHECKPOINT", f"run {run_id} has no committed checkpoint at step {step}; it has {there}"
        )
    return committed[max(committed) if step is None else step]


def export_folder(run: RunSnapshot, layout: str, untrained: bool) -> str:
    """Where an export lies unless told otherwise."""
    return str(Path(run.output_dir) / "exports" / (f"{layout}-untrained" if untrained else layout))


def export_draft(
    gate: Client,
    run: RunSnapshot,
    checkpoint: Checkpoint,
    layout: str,
    *,
    untrained: bool = False,
    output_dir: str = "",
) -> ExportDraftResponse:
    """layout "": the one that is preferred for the run's strategy."""
    layout = layout or default_layout(run.strategy)
    request = ExportDraftRequest(
        checkpoint_uri=checkpoint.uri,
        layout=layout,
        output_dir=output_dir or export_folder(run, layout, untrained),
        untrained=untrained,
        run_id=run.run_id,
    )
    return gate.call(gate.gate.ExportDraft, request, timeout_s=EXPORT_TIMEOUT_S)


def run_gate(gate: Client, request: StartGateRequest, on_status: Callable[[GateStatus], None]) -> GateStatus:
    """Starts a gate job and follows it to its end. Raises SpecfleetError SF-GATE-ERROR when the job itself failed."""
    gate_id = gate.call(gate.gate.StartGate, request, timeout_s=120).gate_id
    status = follow_gate(gate, gate_id, on_status)
    if status.state == "ERROR":
        raise SpecfleetError("SF-GATE-ERROR", f"gate {gate_id} of run {request.run_id} broke off: {status.message}")
    return status


def follow_gate(gate: Client, gate_id: str, on_status: Callable[[GateStatus], None]) -> GateStatus:
    """Status updates until the job is terminal; survives a broken stream."""
    last_seen = time.monotonic()
    while True:
        try:
            for response in gate.gate.WatchGate(WatchGateRequest(gate_id=gate_id)):
                last_seen = time.monotonic()
                on_status(response.status)
                if response.status.state in TERMINAL_GATE_STATES:
                    return response.status
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE or time.monotonic() - last_seen > WATCH_PATIENCE_S:
                raise from_rpc(error, gate.address) from None
        time.sleep(0.5)


def report_of(status: GateStatus) -> dict[str, Any]:
    """The job's report; empty before the job is terminal."""
    report: dict[str, Any] = json.loads(status.report_json or "{}")
    return report
