"""Gate jobs: one at a time, in child processes, written down before they start so that a killed service resumes them."""

import asyncio
import json
import os
import secrets
import sys
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import structlog
from google.protobuf.json_format import MessageToDict, ParseDict

from specfleet.contracts import errors
from specfleet.contracts.errors import DataError, SpecfleetError
from specfleet.gate import metrics
from specfleet.wire.gate_pb2 import GateStatus, StartGateRequest

log = structlog.get_logger()

TERMINAL = frozenset({"PASS", "FAIL", "ERROR"})
_REQUEST, _STATUS = "request.json", "status.json"
# From SIGTERM to SIGKILL of a child.
_GRACE_S = 5.0
# A report with every row of a large evaluation set is a few MB on one line.
_LINE_BYTES = 64 << 20

# OpenMP threads that spin at barriers make a forward pass many times slower as soon as another process wants a core.
_CHILD_ENV = {"OMP_WAIT_POLICY": "passive"}

OnProgress = Callable[[dict[str, Any]], None]


async def run_child(order: dict[str, Any], on_progress: OnProgress = lambda progress: None) -> dict[str, Any]:
    """Runs one order in a child process; returns its result. Raises the child's SpecfleetError."""
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "specfleet.gate.child",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=_CHILD_ENV | os.environ,
        limit=_LINE_BYTES,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        child.stdin.write(json.dumps(order | {"parent": os.getpid()}).encode())
        child.stdin.close()
        async for line in child.stdout:
            message = json.loads(line)
            if "result" in message:
                result: dict[str, Any] = message["result"]
                return result
            if "error" in message:
                raise _restored(message["error"])
            on_progress(message["progress"])
        code = await child.wait()
        raise SpecfleetError(
            "SF-GATE-CHILD", f"the {order['do']} process ended with code {code} before it had a result"
        )
    finally:
        await _end(child)


async def _end(child: asyncio.subprocess.Process) -> None:
    if child.returncode is None:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            # Otherwise it has just written its last line and ends by itself.
            child.terminate()
        try:
            await asyncio.wait_for(child.wait(), _GRACE_S)
        except TimeoutError:
            child.kill()
            await child.wait()


def _restored(error: dict[str, str]) -> SpecfleetError:
    kind = getattr(errors, error["type"], SpecfleetError)
    restored: SpecfleetError = kind(error["code"], error["message"])
    return restored


class Jobs:
    """The queue. `on_done(request, status)` is called after a verdict was written down."""

    def __init__(
        self,
        folder: Path,
        device: str,
        on_done: Callable[[StartGateRequest, GateStatus], Awaitable[None]],
        sglang_python: str = "",
        sglang_flags: str = "",
    ) -> None:
        self._folder, self._device, self._on_done = folder, device, on_done
        self._sglang_python, self._sglang_flags = sglang_python, sglang_flags
        self._requests: dict[str, StartGateRequest] = {}
        self._status: dict[str, GateStatus] = {}
        self._queue: deque[str] = deque()
        self._changed = asyncio.Condition()

    def restore(self) -> int:
        """Reads what earlier lives wrote down; unfinished jobs are queued again. Returns their number."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for request_file in sorted(self._folder.glob(f"*/{_REQUEST}"), key=lambda path: path.stat().st_mtime):
            gate_id = request_file.parent.name
            request = ParseDict(json.loads(request_file.read_text(encoding="utf-8")), StartGateRequest())
            self._requests[gate_id] = request
            status_file = request_file.parent / _STATUS
            if status_file.is_file():
                self._status[gate_id] = ParseDict(json.loads(status_file.read_text(encoding="utf-8")), GateStatus())
            else:
                self._enqueue(gate_id, request)
        return len(self._queue)

    async def start(self, request: StartGateRequest) -> str:
        """Accepts a job durably and returns its id."""
        gate_id = f"gate-{request.run_id or 'export'}-{secrets.token_hex(3)}"
        if not request.output_dir:
            request.output_dir = str(self._folder / gate_id)
        (self._folder / gate_id).mkdir(parents=True)
        _write(self._folder / gate_id / _REQUEST, MessageToDict(request, preserving_proto_field_name=True))
        self._requests[gate_id] = request
        self._enqueue(gate_id, request)
        await self._notify()
        return gate_id

    def status(self, gate_id: str) -> GateStatus:
        """Raises DataError SF-GATE-NOT-FOUND."""
        if gate_id not in self._status:
            known = ", ".join(list(self._status)[-5:]) or "none"
            raise DataError("SF-GATE-NOT-FOUND", f"there is no gate job {gate_id!r}; the newest are: {known}")
        copy = GateStatus()
        copy.CopyFrom(self._status[gate_id])
        return copy

    async def watch(self, gate_id: str) -> AsyncIterator[GateStatus]:
        """The status now and after each change, until it is terminal."""
        seen = self.status(gate_id)
        yield seen
        while seen.state not in TERMINAL:
            async with self._changed:
                while self._status[gate_id] == seen:
                    await self._changed.wait()
            seen = self.status(gate_id)
            yield seen

    async def run(self) -> None:
        """Works through the queue for ever. A cancelled job stays written down and starts over in the next life."""
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: bool(self._queue))
            gate_id = self._queue.popleft()
            await self._run_one(gate_id, self._requests[gate_id])

    def unreported(self) -> list[tuple[StartGateRequest, GateStatus]]:
        """Verdicts of earlier lives; recording one twice is harmless."""
        return [
            (self._requests[gate_id], status)
            for gate_id, status in self._status.items()
            if status.state in ("PASS", "FAIL") and not (self._folder / gate_id / "recorded").exists()
        ]

    def mark_recorded(self, gate_id: str) -> None:
        (self._folder / gate_id / "recorded").touch()

    async def _run_one(self, gate_id: str, request: StartGateRequest) -> None:
        status = self._status[gate_id]
        status.state = "RUNNING"
        await self._notify()
        waiting: set[asyncio.Task[None]] = set()

        def on_progress(progress: dict[str, Any]) -> None:
            status.stage, status.done, status.total = progress["stage"], progress["done"], progress["total"]
            task = asyncio.ensure_future(self._notify())
            waiting.add(task)
            task.add_done_callback(waiting.discard)

        order = {
            "do": "gate",
            "request": MessageToDict(request, preserving_proto_field_name=True),
            "device": self._device,
            "sglang_python": self._sglang_python,
            "sglang_flags": self._sglang_flags,
        }
        log.info("gate job starts", gate=gate_id, run=request.run_id, export=request.export_dir)
        try:
            with metrics.JOB_SECONDS.time():
                report = await run_child(order, on_progress)
        except SpecfleetError as error:
            status.state, status.message = "ERROR", str(error)
        else:
            status.state, status.message = report["verdict"], _failures(report)
            status.report_json = json.dumps(report, ensure_ascii=False)
            status.done = status.total
        _write(self._folder / gate_id / _STATUS, MessageToDict(status, preserving_proto_field_name=True))
        metrics.JOBS.labels(status.state).inc()
        log.info("gate job ended", gate=gate_id, state=status.state, message=status.message)
        await self._notify()
        if status.state != "ERROR":
            await self._on_done(request, status)

    def _enqueue(self, gate_id: str, request: StartGateRequest) -> None:
        self._status[gate_id] = GateStatus(gate_id=gate_id, run_id=request.run_id, state="QUEUED")
        self._queue.append(gate_id)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


def _failures(report: dict[str, Any]) -> str:
    return "; ".join(f"{check['name']}: {check['detail']}" for check in report["checks"] if check["result"] == "FAIL")


def _write(path: Path, document: dict[str, Any]) -> None:
    """Whole or not at all, and on disk before the caller answers."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        json.dump(document, file, ensure_ascii=False)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
