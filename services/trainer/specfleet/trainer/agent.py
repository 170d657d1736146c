"""The trainer agent of one node: registers, beats, and keeps running exactly what the coordinator lists."""

import asyncio
import importlib.metadata
import math
import os
import platform
import socket
import sys
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import structlog
from prometheus_client import Gauge

from specfleet.contracts.errors import ConfigError, SpecfleetError, UnreachableError
from specfleet.rpc.client import call, connect
from specfleet.telemetry import logs
from specfleet.telemetry.http import TelemetryServer
from specfleet.telemetry.process import stop_event
from specfleet.trainer.launch import RunningLaunch
from specfleet.trainer.metrics import FILE as METRICS_FILE
from specfleet.trainer.metrics import last_line
from specfleet.wire.trainer_pb2 import HeartbeatAgentRequest, HeartbeatAgentResponse, RegisterAgentRequest
from specfleet.wire.trainer_pb2_grpc import TrainerControlStub

if TYPE_CHECKING:
    from specfleet.wire.trainer_pb2_grpc import TrainerControlAsyncStub

log = structlog.get_logger()

_CALL_TIMEOUT_S = 5.0
_DEFAULT_HEARTBEAT_S = 2.0
# A rank's own grace plus the write of one last checkpoint (stop.STOP_GRACE_S, elastic._SHUTDOWN_S).
_LEAVE_GRACE_S = 75.0

_STEP = Gauge("specfleet_trainer_step", "Last optimizer step of the run on this node.", ["run"])
_TOKENS = Gauge("specfleet_trainer_tokens_per_second", "Tokens per second of the last step, all ranks.", ["run"])
_WAIT = Gauge("specfleet_trainer_wait_share", "Share of the last step spent waiting for data, 0..1.", ["run"])
_LAUNCHES = Gauge("specfleet_trainer_launches", "Launches running on this node.")


@dataclass(frozen=True)
class AgentOptions:
    coordinator: str
    nats: str
    store: str
    metrics: str
    agent_id: str
    slots: int
    """Ranks this node can run; 0: the number of CUDA devices, or 1 on a CPU."""
    device: str
    insecure: bool = False


async def serve(options: AgentOptions) -> None:
    """Runs the agent until SIGTERM. Raises ConfigError SF-CONFIG-DEVICE."""
    logs.configure("trainer")
    if options.device not in ("auto", "cpu", "cuda"):
        raise ConfigError("SF-CONFIG-DEVICE", f"--device {options.device!r} is not one of auto, cpu, cuda")
    await Agent(replace(options, agent_id=options.agent_id or f"trainer-{socket.gethostname()}")).run()


class Agent:
    def __init__(self, options: AgentOptions) -> None:
        self._options = options
        # Agents are made inside the running loop: an aio channel belongs to the loop that runs when it is made.
        self._stub: TrainerControlAsyncStub = TrainerControlStub(connect(options.coordinator))
        self._launches: dict[str, RunningLaunch] = {}
        self._watchers: set[asyncio.Task[None]] = set()
        self._heartbeat_s = _DEFAULT_HEARTBEAT_S
        self._registered = False
        self._leaving = False
        self._hurry = asyncio.Event()
        """Set when the coordinator should hear something before the next heartbeat is due."""

    async def run(self) -> None:
        """Until SIGTERM; then ranks finish their step, write a checkpoint and detach, and the agent leaves."""
        stop = stop_event()
        telemetry = TelemetryServer(self._options.metrics, self._ready, insecure=self._options.insecure)
        port = await telemetry.start()
        log.info("agent started", agent=self._options.agent_id, metrics_port=port, pid=os.getpid())
        devices = await _cuda_devices(self._options.device)
        beating = asyncio.create_task(self._beat(devices))
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({beating, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if beating.done():
                await beating
        finally:
            stopping.cancel()
            # Heartbeats go on while the ranks leave: a silent agent would be taken for dead, and its run for free.
            await self._stop_launches()
            beating.cancel()
            await self._say_goodbye()
            await telemetry.stop()

    def _ready(self) -> tuple[bool, str]:
        return self._registered, "" if self._registered else f"not registered at {self._options.coordinator}"

    async def _beat(self, devices: int) -> None:
        await self._register(devices)
        while True:
            self._hurry.clear()
            try:
                response = await self._heartbeat()
            except SpecfleetError as error:
                # Away, or in trouble of its own. Ranks train on; their acks wait for the coordinator as well.
                log.warning("no heartbeat", code=error.code, reason=error.message)
            else:
                if response.unknown:
                    await self._register(devices)
                    continue
                await self._reconcile(response)
            self._observe()
            try:
                async with asyncio.timeout(self._heartbeat_s):
                    await self._hurry.wait()
            except TimeoutError:
                pass

    async def _register(self, devices: int) -> None:
        self._registered = False
        request = RegisterAgentRequest(
            agent_id=self._options.agent_id,
            host=socket.gethostname(),
            pid=os.getpid(),
            slots=self._options.slots or max(1, devices),
            device="cuda" if devices else "cpu",
            versions={
                "python": platform.python_version(),
                "torch": importlib.metadata.version("torch"),
                "specfleet": importlib.metadata.version("specfleet"),
            },
        )
        while True:
            try:
                response = await call(self._stub.RegisterAgent, request, timeout_s=_CALL_TIMEOUT_S, retry_s=math.inf)
                break
            except UnreachableError as error:
                log.info("still registering", reason=error.message)
        self._heartbeat_s = response.heartbeat_s or _DEFAULT_HEARTBEAT_S
        self._registered = True
        log.info("registered", coordinator=self._options.coordinator, slots=request.slots, device=request.device)

    async def _heartbeat(self) -> HeartbeatAgentResponse:
        request = HeartbeatAgentRequest(
            agent_id=self._options.agent_id, launches=[launch.status() for launch in self._launches.values()]
        )
        return await call(self._stub.HeartbeatAgent, request, timeout_s=_CALL_TIMEOUT_S)

    async def _reconcile(self, response: HeartbeatAgentResponse) -> None:
        listed = {launch.launch_id: launch for launch in response.launches}
        for launch_id in [known for known in self._launches if known not in listed]:
            running = self._launches[launch_id]
            if running.exited:
                # Its end was reported and understood.
                del self._launches[launch_id]
            else:
                self._watch(self._stop_launch(running))
        for launch_id, launch in listed.items():
            if launch_id not in self._launches and not self._leaving:
                running = RunningLaunch(launch, self._rank_arguments())
                self._launches[launch_id] = running
                await running.start()
                self._watch(self._report_end(running))
        _LAUNCHES.set(sum(not launch.exited for launch in self._launches.values()))

    async def _stop_launch(self, running: RunningLaunch) -> None:
        await running.stop(_LEAVE_GRACE_S)

    async def _report_end(self, running: RunningLaunch) -> None:
        await running.wait()
        self._hurry.set()

    def _rank_arguments(self) -> list[str]:
        options = self._options
        return [
            "--coordinator", options.coordinator, "--nats", options.nats, "--store", options.store,
            "--agent-id", options.agent_id, "--device", options.device,
        ]  # fmt: skip

    def _watch(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._watchers.add(task)
        task.add_done_callback(self._watchers.discard)

    def _observe(self) -> None:
        for running in self._launches.values():
            line = None if running.exited else last_line(running.directory / METRICS_FILE)
            if line is not None:
                run = running.launch.run_id
                busy_s, wait_s = float(line.get("step_s", 0.0)), float(line.get("wait_s", 0.0))
                _STEP.labels(run).set(line["step"])
                _TOKENS.labels(run).set(line.get("tokens_per_s", 0.0))
                _WAIT.labels(run).set(wait_s / max(1e-9, busy_s + wait_s))

    async def _stop_launches(self) -> None:
        self._leaving = True
        await asyncio.gather(*(running.stop(_LEAVE_GRACE_S) for running in self._launches.values()))

    async def _say_goodbye(self) -> None:
        """Tells the coordinator how the launches ended, if it is there to hear it."""
        for task in self._watchers:
            task.cancel()
        if self._launches:
            try:
                await self._heartbeat()
            except SpecfleetError as error:
                log.warning("left without a last heartbeat", reason=error.message)


async def _cuda_devices(device: str) -> int:
    """CUDA devices torch sees, asked in a process of its own: the agent itself never loads torch."""
    if device == "cpu":
        return 0
    code = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    output, _ = await process.communicate()
    return int(output.strip() or 0)
