"""Runs the services of an embedded stack: ordered start, readiness, restart with back-off, ordered stop.

Children are in sessions of their own (Ctrl-C reaches only the supervisor, which then stops them in order) and get SIGTERM
from the kernel when the supervisor dies.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from specfleet.contracts.errors import HostError
from specfleet.ctl import probes
from specfleet.ctl.state import ServiceState, StackState, is_alive, log_tail, start_ticks, write_state
from specfleet.ctl.topology import Service
from specfleet.telemetry.process import dies_with

MAX_BACKOFF_S = 30.0
# A life this long counts as healthy: the next crash is restarted fast again.
HEALTHY_S = 30.0
# A service that dies this often before it was ever ready is broken, not unlucky.
BOOT_ATTEMPTS = 2
PROBE_EVERY_S = 0.05
MAX_LOG_BYTES = 16 << 20


def resolve(program: str) -> str:
    """Path of a service's program: beside this interpreter (its virtual environment), else on PATH.

    Raises HostError SF-HOST-PROGRAM naming what provides it.
    """
    beside = Path(sys.executable).parent / program
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which(program)
    if found is None:
        raise HostError(
            "SF-HOST-PROGRAM",
            f"{program} is neither beside {sys.executable} nor on PATH; pip install 'specfleet[local]' has it",
        )
    return found


@dataclass
class _Child:
    service: Service
    state: ServiceState
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    """Set from the first time it was ready."""
    failed: asyncio.Event = field(default_factory=asyncio.Event)
    process: asyncio.subprocess.Process | None = None
    keeper: asyncio.Task[None] | None = None


def tiers(services: Sequence[Service]) -> list[list[Service]]:
    """Services grouped so that each starts after everything it depends on."""
    left, started, grouped = list(services), set[str](), list[list[Service]]()
    while left:
        tier = [service for service in left if set(service.after) <= started]
        if not tier:
            raise ValueError(f"services wait for one another: {', '.join(service.name for service in left)}")
        grouped.append(tier)
        started |= {service.name for service in tier}
        left = [service for service in left if service.name not in started]
    return grouped


class Supervisor:
    """Owns the services of one state folder. `run` returns after an ordered stop."""

    def __init__(
        self,
        services: Sequence[Service],
        state: StackState,
        state_dir: Path,
        *,
        report: Callable[[str], None] = lambda line: None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """report: called with one line per event. env: the children's environment; the supervisor's when None."""
        self._tiers = tiers(services)
        self._state, self._dir, self._report, self._env = state, state_dir, report, env
        self._children = {
            service.name: _Child(service, ServiceState(ports={port: state.ports[port] for port in service.ports}))
            for service in services
        }
        state.services = {name: child.state for name, child in self._children.items()}
        self._stopping = asyncio.Event()
        self._hurry = asyncio.Event()

    def stop(self) -> None:
        """Ordered stop; asked a second time, kill what is left at once."""
        if self._stopping.is_set():
            self._hurry.set()
        self._stopping.set()

    async def run(self, on_ready: Callable[[], None] = lambda: None) -> None:
        """Starts everything, keeps it running until `stop`, stops it in order.

        Raises HostError SF-STACK-START with the failing service's last log lines; everything else is stopped by then.
        """
        (self._dir / "logs").mkdir(parents=True, exist_ok=True)
        self._state.supervisor_pid, self._state.supervisor_ticks = os.getpid(), start_ticks(os.getpid())
        self._state.started_at_unix = time.time()
        self._set("starting")
        failure: HostError | None = None
        try:
            failure = await self._boot()
            if failure is None and not self._stopping.is_set():
                self._set("ready")
                on_ready()
                await self._stopping.wait()
        finally:
            self._stopping.set()
            if failure is None:
                self._set("stopping")
            await self._stop_all()
            self._set("failed" if failure else "stopped", failure.message if failure else "")
        if failure:
            raise failure

    async def _boot(self) -> HostError | None:
        for tier in self._tiers:
            children = [self._children[service.name] for service in tier]
            for child in children:
                child.keeper = asyncio.create_task(self._keep(child), name=child.service.name)
            for child in children:
                if not await self._await_ready(child):
                    return None if self._stopping.is_set() else self._explain(child)
        return None

    async def _await_ready(self, child: _Child) -> bool:
        waits = [asyncio.ensure_future(event.wait()) for event in (child.ready, child.failed, self._stopping)]
        try:
            await asyncio.wait(waits, timeout=child.service.ready_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return child.ready.is_set() and not self._stopping.is_set()

    def _explain(self, child: _Child) -> HostError:
        name, state = child.service.name, child.state
        how = (
            f"ended with {state.last_exit}"
            if child.failed.is_set()
            else f"was not ready after {child.service.ready_s:.0f} s"
        )
        state.state = "failed"
        tail = log_tail(self._dir, name)
        log = self._dir / "logs" / f"{name}.log"
        return HostError("SF-STACK-START", f"{name} {how}; the end of {log}:\n{tail or '(it wrote nothing)'}")

    async def _keep(self, child: _Child) -> None:
        """One service's life: start, wait for its end, wait a little longer each time, start again."""
        service, delay_s, attempts = child.service, child.service.restart_delay_s, 0
        while not self._stopping.is_set():
            attempts += 1
            started = time.monotonic()
            try:
                process = await self._spawn(child)
            except (OSError, HostError) as error:
                self._log_line(service.name, f"cannot be started: {error}")
                child.state.last_exit = -1
            else:
                watch = asyncio.create_task(self._watch_ready(child, started))
                child.state.last_exit = await process.wait()
                watch.cancel()
                self._sweep(process.pid)
            if self._stopping.is_set():
                return
            if not child.ready.is_set() and attempts >= BOOT_ATTEMPTS:
                child.failed.set()
                return
            if time.monotonic() - started > HEALTHY_S:
                delay_s = service.restart_delay_s
            child.state.restarts += 1
            child.state.pid = child.state.start_ticks = 0
            self._mark(child, "restarting", f"ended with {child.state.last_exit}; starts again in {delay_s:.1f} s")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay_s)
            delay_s = min(delay_s * 2, max(MAX_BACKOFF_S, service.restart_delay_s))

    async def _spawn(self, child: _Child) -> asyncio.subprocess.Process:
        service = child.service
        program = resolve(service.argv[0])
        path = self._dir / "logs" / f"{service.name}.log"
        if path.exists() and path.stat().st_size > MAX_LOG_BYTES:
            path.replace(path.with_suffix(".log.1"))
        with path.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                program,
                *service.argv[1:],
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._env,
                start_new_session=True,
                preexec_fn=dies_with(os.getpid()),
            )
        child.process = process
        child.state.pid, child.state.start_ticks = process.pid, start_ticks(process.pid)
        self._mark(child, "starting")
        return process

    async def _watch_ready(self, child: _Child, started: float) -> None:
        while True:
            answers = [await probes.check(probe, self._state.ports[probe.port]) for probe in child.service.probes]
            if all(answers):
                break
            await asyncio.sleep(PROBE_EVERY_S)
        if not child.ready.is_set() and child.service.warm_up:
            await self._warm_up(child.service)
        self._mark(child, "ready", f"ready after {time.monotonic() - started:.2f} s, pid {child.state.pid}")
        child.ready.set()

    async def _warm_up(self, service: Service) -> None:
        """Only speed depends on it: a failure is reported and forgotten."""
        with (self._dir / "logs" / f"{service.name}.log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                resolve(service.warm_up[0]),
                *service.warm_up[1:],
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._env,
                preexec_fn=dies_with(os.getpid()),
            )
        try:
            code = await process.wait()
        except asyncio.CancelledError:
            process.kill()
            raise
        if code != 0:
            self._report(f"{service.name}: warming up ended with {code}; see its log")

    async def _stop_all(self) -> None:
        for tier in reversed(self._tiers):
            await asyncio.gather(*(self._stop_one(self._children[service.name]) for service in tier))

    async def _stop_one(self, child: _Child) -> None:
        if child.keeper is None:
            return
        process = child.process
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            waits = [child.keeper, asyncio.ensure_future(self._hurry.wait())]
            await asyncio.wait(waits, timeout=child.service.grace_s, return_when=asyncio.FIRST_COMPLETED)
            waits[1].cancel()
            if process.returncode is None:
                self._report(f"{child.service.name}: still there after {child.service.grace_s:.0f} s; killed")
                self._sweep(process.pid)
        await child.keeper
        child.state.pid = child.state.start_ticks = 0
        if child.state.state != "failed":
            self._mark(child, "stopped", "stopped")

    @staticmethod
    def _sweep(group: int) -> None:
        """Kills what is left of a service's process group: ranks of a killed trainer agent belong to a fenced generation."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)

    def _log_line(self, service: str, line: str) -> None:
        with (self._dir / "logs" / f"{service}.log").open("a") as log:
            log.write(line + "\n")

    def _mark(self, child: _Child, state: str, line: str = "") -> None:
        child.state.state, child.state.since_unix = state, time.time()
        write_state(self._dir, self._state)
        if line:
            self._report(f"{child.service.name}: {line}")

    def _set(self, state: str, message: str = "") -> None:
        self._state.state, self._state.message = state, message
        write_state(self._dir, self._state)


def end_leftovers(state: StackState, grace_s: float = 5.0) -> list[str]:
    """Ends services that outlived their supervisor (both were recorded; pid and start time must still agree). Names them."""
    alive = {name: s for name, s in state.services.items() if is_alive(s.pid, s.start_ticks)}
    for service in alive.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(service.pid, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while any(is_alive(s.pid, s.start_ticks) for s in alive.values()) and time.monotonic() < deadline:
        time.sleep(0.05)
    for service in alive.values():
        if is_alive(service.pid, service.start_ticks):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(service.pid, signal.SIGKILL)
    return sorted(alive)
