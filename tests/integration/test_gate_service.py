"""The gate process over real gRPC: export, gate jobs, a kill in the middle, a coordinator that comes late."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from fixtures.gate_case import GateCase, make_gate_case
from fixtures.net import free_port

from specfleet.contracts.errors import ConfigError, DataError, SpecfleetError
from specfleet.rpc.client import call, connect
from specfleet.rpc.server import RpcServer
from specfleet.wire import gate_pb2 as pb
from specfleet.wire.gate_pb2_grpc import GateServiceStub
from specfleet.wire.run_pb2 import RecordGateReportRequest, RecordGateReportResponse
from specfleet.wire.run_pb2_grpc import RunServiceServicer, add_RunServiceServicer_to_server

pytestmark = pytest.mark.integration


class Coordinator(RunServiceServicer):
    """Takes gate reports."""

    def __init__(self) -> None:
        self.reports: asyncio.Queue[RecordGateReportRequest] = asyncio.Queue()

    async def RecordGateReport(self, request: RecordGateReportRequest, context: object) -> RecordGateReportResponse:
        self.reports.put_nowait(request)
        return RecordGateReportResponse()


class Gate:
    """A gate process on a port and a folder that outlive it."""

    def __init__(self, data_dir: Path, coordinator: str) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self._env = os.environ | {
            "SPECFLEET_LISTEN": self.address,
            "SPECFLEET_DATA_DIR": str(data_dir),
            "SPECFLEET_COORDINATOR": coordinator,
            "SPECFLEET_DEVICE": "cpu",
        }
        self._channel = connect(self.address)
        self.stub = GateServiceStub(self._channel)
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        self.process = await asyncio.create_subprocess_exec(sys.executable, "-m", "specfleet.gate", env=self._env)

    async def end(self, number: signal.Signals) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        async with asyncio.timeout(20):
            return await self.process.wait()

    async def close(self) -> None:
        if self.process is not None and self.process.returncode is None:
            await self.end(signal.SIGKILL)
        await self._channel.close(grace=None)

    async def until(self, gate_id: str, *states: str) -> pb.GateStatus:
        """Follows the job as specctl does; returns the first status in one of the states."""
        async with asyncio.timeout(120):
            async for answer in self.stub.WatchGate(pb.WatchGateRequest(gate_id=gate_id)):
                if answer.status.state in states:
                    return answer.status
        raise AssertionError("the stream ended before the job did")


@pytest.fixture(scope="module")
def case(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> GateCase:
    return make_gate_case(tiny_target, tmp_path_factory.mktemp("gate-case"))


@pytest.fixture
async def gate(tmp_path: Path) -> AsyncIterator[Gate]:
    gate = Gate(tmp_path / "data", f"127.0.0.1:{free_port()}")
    await gate.start()
    yield gate
    await gate.close()


async def test_export_gate_kill_resume_record(case: GateCase, gate: Gate, tmp_path: Path) -> None:
    exports = []
    for untrained in (False, True):
        request = pb.ExportDraftRequest(
            checkpoint_uri=str(case.checkpoint), layout="sglang", output_dir=str(tmp_path / f"export-{untrained}"),
            untrained=untrained, run_id="gate-test",
        )  # fmt: skip
        answer = await call(gate.stub.ExportDraft, request, timeout_s=60, retry_s=60)
        exports.append(answer.output_dir)
        assert {"config.json", "model.safetensors", "provenance.json"} <= set(answer.files)
        assert {path.name for path in Path(answer.output_dir).iterdir()} == set(answer.files)

    job = pb.StartGateRequest(
        run_id="gate-test", export_dir=exports[0], baseline_export_dir=exports[1], target=str(case.target),
        eval_set_uri=str(case.eval_set), num_draft_tokens=4, lossless_rows=1, lossless_new_tokens=8,
        output_dir=str(tmp_path / "gate"), require_improvement=True, dtype="bfloat16",
    )  # fmt: skip
    first = (await call(gate.stub.StartGate, job, timeout_s=10)).gate_id
    second = (await call(gate.stub.StartGate, job, timeout_s=10)).gate_id
    await gate.until(first, "RUNNING")
    queued = await call(gate.stub.GetGate, pb.GetGateRequest(gate_id=second), timeout_s=10)
    assert queued.status.state == "QUEUED"

    await gate.end(signal.SIGKILL)
    await gate.start()
    await call(gate.stub.GetGate, pb.GetGateRequest(gate_id=first), timeout_s=10, retry_s=60)
    for gate_id in (first, second):
        status = await gate.until(gate_id, "PASS", "FAIL", "ERROR")
        assert (status.state, status.message) == ("PASS", "")
    report = json.loads(status.report_json)
    assert report["verdict"] == "PASS"
    assert report == json.loads((tmp_path / "gate" / "report.json").read_text())

    # The coordinator was away all the time; it hears of both verdicts, and not again after a restart.
    coordinator = Coordinator()
    server = RpcServer(gate._env["SPECFLEET_COORDINATOR"])
    server.add(add_RunServiceServicer_to_server, coordinator, "specfleet.v1.RunService")
    await server.start()
    async with asyncio.timeout(20):
        reports = [await coordinator.reports.get() for _ in range(2)]
    assert {report.gate_id for report in reports} == {first, second}
    assert {report.verdict for report in reports} == {"PASS"}
    assert json.loads(reports[0].report_json)["run_id"] == "gate-test"
    assert await gate.end(signal.SIGTERM) == 0
    await gate.start()
    again = await call(gate.stub.GetGate, pb.GetGateRequest(gate_id=second), timeout_s=10, retry_s=60)
    assert again.status.state == "PASS"
    assert coordinator.reports.empty()
    await server.stop(0.0)


async def test_errors_are_told_apart(case: GateCase, gate: Gate, tmp_path: Path) -> None:
    missing = pb.ExportDraftRequest(checkpoint_uri=str(tmp_path / "none"), output_dir=str(tmp_path / "out"))
    with pytest.raises(DataError) as error:
        await call(gate.stub.ExportDraft, missing, timeout_s=60, retry_s=60)
    assert error.value.code == "SF-CHECKPOINT-MISSING"

    with pytest.raises(SpecfleetError) as error:
        await call(gate.stub.GetGate, pb.GetGateRequest(gate_id="gate-x"), timeout_s=10)
    assert error.value.code == "SF-GATE-NOT-FOUND"
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await gate.stub.GetGate(pb.GetGateRequest(gate_id="gate-x"))
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND

    bad = pb.StartGateRequest(export_dir="e", target="t", eval_set_uri="s", acceptance_rule="typical")
    with pytest.raises(ConfigError, match="'typical' is not one of rejection, target_only"):
        await call(gate.stub.StartGate, bad, timeout_s=10)

    (tmp_path / "empty").mkdir()
    request = pb.StartGateRequest(
        export_dir=str(tmp_path / "empty"), target=str(tmp_path / "no-target"), eval_set_uri=str(case.eval_set)
    )
    gate_id = (await call(gate.stub.StartGate, request, timeout_s=10)).gate_id
    status = await gate.until(gate_id, "PASS", "FAIL", "ERROR")
    assert status.state == "ERROR"
    assert "SF-TARGET-MISSING" in status.message

    request.target = str(case.target)
    gate_id = (await call(gate.stub.StartGate, request, timeout_s=10)).gate_id
    status = await gate.until(gate_id, "PASS", "FAIL", "ERROR")
    assert status.state == "FAIL"
    assert "loader_table" in status.message
