"""Puts the gate process together: jobs, gRPC, telemetry, and the reports that the coordinator should know."""

import asyncio
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from specfleet.contracts.errors import SpecfleetError
from specfleet.gate.jobs import Jobs
from specfleet.gate.service import GateApi
from specfleet.rpc.client import call, connect
from specfleet.rpc.server import RpcServer
from specfleet.telemetry import logs
from specfleet.telemetry.http import TelemetryServer
from specfleet.telemetry.process import own_folder, stop_event
from specfleet.wire.gate_pb2 import GateStatus, StartGateRequest
from specfleet.wire.gate_pb2_grpc import add_GateServiceServicer_to_server
from specfleet.wire.run_pb2 import RecordGateReportRequest
from specfleet.wire.run_pb2_grpc import RunServiceStub

log = structlog.get_logger()


@dataclass(frozen=True)
class Options:
    """The command line of specfleet-gate."""

    listen: str
    metrics: str
    coordinator: str
    data_dir: Path
    device: str
    sglang_python: str
    sglang_flags: str
    insecure: bool


class Recorder:
    """Tells the coordinator about verdicts, waiting for it as long as it takes, never holding up the next job."""

    def __init__(self, coordinator: str) -> None:
        self._address = coordinator
        self._channel = connect(coordinator) if coordinator else None
        self._tasks: set[asyncio.Task[None]] = set()
        self.jobs: Jobs | None = None

    async def record(self, request: StartGateRequest, status: GateStatus) -> None:
        if self._channel is None or not request.run_id:
            return
        report = RecordGateReportRequest(
            run_id=request.run_id, gate_id=status.gate_id, verdict=status.state, report_json=status.report_json
        )
        task = asyncio.create_task(self._send(RunServiceStub(self._channel), report))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send(self, stub: Any, report: RecordGateReportRequest) -> None:
        try:
            await call(stub.RecordGateReport, report, timeout_s=30, retry_s=math.inf, address=self._address)
        except SpecfleetError as error:
            # The report is on disk and in GetGate either way; the next start of the gate tries again.
            log.warning("report not recorded in the ledger", gate=report.gate_id, error=str(error))
            return
        if self.jobs is not None:
            self.jobs.mark_recorded(report.gate_id)

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._channel is not None:
            await self._channel.close(grace=None)


async def serve(options: Options) -> None:
    """Runs the gate until SIGTERM or SIGINT; an unfinished job starts over in the next life."""
    logs.configure("gate")
    stop = stop_event()
    recorder = Recorder(options.coordinator)
    jobs = Jobs(
        own_folder(options.data_dir).resolve() / "jobs",
        options.device,
        recorder.record,
        options.sglang_python,
        options.sglang_flags,
    )
    recorder.jobs = jobs
    resumed = jobs.restore()
    server = RpcServer(options.listen, insecure=options.insecure)
    server.add(add_GateServiceServicer_to_server, GateApi(jobs, options.device), "specfleet.v1.GateService")
    telemetry = TelemetryServer(options.metrics, lambda: (True, "serving"), insecure=options.insecure)
    working = asyncio.create_task(jobs.run())
    stopping = asyncio.create_task(stop.wait())
    try:
        port = await server.start()
        metrics_port = await telemetry.start()
        log.info("gate serves", port=port, metrics_port=metrics_port, resumed_jobs=resumed)
        for request, status in jobs.unreported():
            await recorder.record(request, status)
        await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
    finally:
        for task in (working, stopping):
            task.cancel()
        await asyncio.gather(working, stopping, return_exceptions=True)
        await server.stop(grace_s=1.0)
        await telemetry.stop()
        await recorder.close()
