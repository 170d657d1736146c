"""The process that does the work: torch lives and dies here, so the service stays small and a crash costs one job.

stdin: one JSON object {"do": "export" | "gate", "request", "device", "sglang_python", "sglang_flags", "parent": pid}. stdout: one
JSON object a line, any number of {"progress": {"stage", "done", "total"}}, then one {"result": …} or {"error": {"type", "code",
"message"}}.
"""

import json
import os
import sys
from typing import Any, TextIO

import structlog
from google.protobuf.json_format import ParseDict

from specfleet.contracts.errors import SpecfleetError
from specfleet.telemetry import logs
from specfleet.telemetry.process import die_with_parent
from specfleet.wire.gate_pb2 import ExportDraftRequest, StartGateRequest

log = structlog.get_logger()


def main() -> None:
    # Whatever a library prints must not get between the protocol's lines.
    out = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    logs.configure("gate-job")
    order = json.load(sys.stdin)
    die_with_parent(order["parent"])
    try:
        result = _export(order) if order["do"] == "export" else _gate(order, out)
    except SpecfleetError as error:
        _send(out, {"error": {"type": type(error).__name__, "code": error.code, "message": error.message}})
    except Exception as error:
        log.exception("job failed unexpectedly")
        message = f"{type(error).__name__}: {error}"
        _send(out, {"error": {"type": "SpecfleetError", "code": "SF-GATE-INTERNAL", "message": message}})
    else:
        _send(out, {"result": result})


def _export(order: dict[str, Any]) -> dict[str, Any]:
    from specfleet.gate.exporting import export_checkpoint

    return export_checkpoint(ParseDict(order["request"], ExportDraftRequest()))


def _gate(order: dict[str, Any], out: TextIO) -> dict[str, Any]:
    from specfleet.gate.evaluate import evaluate

    def progress(stage: str, done: int, total: int) -> None:
        _send(out, {"progress": {"stage": stage, "done": done, "total": total}})

    request = ParseDict(order["request"], StartGateRequest())
    return evaluate(request, order["device"], progress, order["sglang_python"], order["sglang_flags"])


def _send(out: TextIO, line: dict[str, Any]) -> None:
    out.write(json.dumps(line, ensure_ascii=False) + "\n")
    out.flush()


if __name__ == "__main__":
    main()
