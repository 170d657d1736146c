"""GateService over gRPC: requests are checked here and worked on in child processes."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import structlog
from google.protobuf.json_format import MessageToDict

from specfleet.contracts.errors import ConfigError
from specfleet.gate import metrics
from specfleet.gate.jobs import Jobs, run_child
from specfleet.wire import gate_pb2 as pb
from specfleet.wire.gate_pb2_grpc import GateServiceServicer

log = structlog.get_logger()

DTYPES = ("", "bfloat16", "float16", "float32")
RULES = ("", "rejection", "target_only")
ENGINES = ("", "sglang")


class GateApi(GateServiceServicer):
    def __init__(self, jobs: Jobs, device: str) -> None:
        self._jobs, self._device = jobs, device

    async def ExportDraft(self, request: pb.ExportDraftRequest, context: Any) -> pb.ExportDraftResponse:
        _require(request, "checkpoint_uri", "output_dir")
        order = {
            "do": "export",
            "request": MessageToDict(request, preserving_proto_field_name=True),
            "device": self._device,
        }
        result = await run_child(order)
        metrics.EXPORTS.inc()
        log.info("draft exported", run=request.run_id, directory=result["output_dir"], untrained=request.untrained)
        return pb.ExportDraftResponse(**result)

    async def StartGate(self, request: pb.StartGateRequest, context: Any) -> pb.StartGateResponse:
        _require(request, "export_dir", "target", "eval_set_uri")
        if request.dtype not in DTYPES:
            raise ConfigError("SF-GATE-REQUEST", f"dtype {request.dtype!r} is not one of {', '.join(DTYPES[1:])}")
        if request.acceptance_rule not in RULES:
            raise ConfigError(
                "SF-GATE-REQUEST", f"acceptance_rule {request.acceptance_rule!r} is not one of {', '.join(RULES[1:])}"
            )
        if request.serve_engine not in ENGINES:
            raise ConfigError(
                "SF-GATE-REQUEST", f"serve_engine {request.serve_engine!r} is not one of {', '.join(ENGINES[1:])}"
            )
        if request.require_improvement and not request.baseline_export_dir:
            raise ConfigError(
                "SF-GATE-REQUEST", "require_improvement needs baseline_export_dir: what should it improve on?"
            )
        if not Path(request.export_dir).is_dir():
            raise ConfigError(
                "SF-GATE-REQUEST", f"export_dir {request.export_dir} does not exist on the gate's machine"
            )
        return pb.StartGateResponse(gate_id=await self._jobs.start(request))

    async def GetGate(self, request: pb.GetGateRequest, context: Any) -> pb.GetGateResponse:
        return pb.GetGateResponse(status=self._jobs.status(request.gate_id))

    async def WatchGate(self, request: pb.WatchGateRequest, context: Any) -> AsyncIterator[pb.WatchGateResponse]:
        async for status in self._jobs.watch(request.gate_id):
            yield pb.WatchGateResponse(status=status)


def _require(request: Any, *fields: str) -> None:
    missing = [field for field in fields if not getattr(request, field)]
    if missing:
        raise ConfigError("SF-GATE-REQUEST", f"{type(request).__name__} needs {', '.join(missing)}")
