"""Starting, stopping and describing the embedded stack of one state folder."""

import asyncio
import ctypes
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specfleet.contracts.errors import EXIT_ENVIRONMENT, HostError, SpecfleetError
from specfleet.ctl.ports import Ports
from specfleet.ctl.state import StackLock, StackState, is_alive, is_running, log_tail, read_state
from specfleet.ctl.supervisor import Supervisor, end_leftovers
from specfleet.ctl.topology import COORDINATOR, GATE, EngineName, Site, StoreKind, embedded_site, port_names, stack

# Trainer, then coordinator, then pool and bus may each use up their grace.
STOP_TIMEOUT_S = 180.0


@dataclass(frozen=True)
class UpOptions:
    state_dir: Path
    store: StoreKind = "mooncake"
    pool_bytes: int = 1 << 30
    engine: EngineName = "hf"
    ports: Mapping[str, int] = field(default_factory=dict)
    slots: int = 0
    """Ranks the trainer runs at a time; 0: one per CUDA device, or 1."""


def require_mooncake() -> None:
    """Raises HostError SF-HOST-MOONCAKE, SF-HOST-LIBIBVERBS when Mooncake cannot run here, with the remedy and the alternative."""
    otherwise = "or keep features in files instead: specctl up --store directory"
    if importlib.util.find_spec("mooncake") is None:
        raise HostError(
            "SF-HOST-MOONCAKE", f"the mooncake package is missing: pip install 'specfleet[mooncake-cpu]' {otherwise}"
        )
    try:
        ctypes.CDLL("libibverbs.so.1")
    except OSError as error:
        raise HostError(
            "SF-HOST-LIBIBVERBS",
            f"Mooncake needs the system library libibverbs.so.1 ({error}): apt-get install libibverbs1 {otherwise}",
        ) from error


def require_memory(pool_bytes: int) -> None:
    """Raises HostError SF-HOST-MEMORY when the pool alone would exceed the memory that is available now."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
            if pool_bytes > available:
                raise HostError(
                    "SF-HOST-MEMORY",
                    f"a pool of {pool_bytes:,} bytes does not fit into the {available:,} bytes of memory that are available; "
                    "choose a smaller --pool",
                )


def require_sglang() -> None:
    """Raises HostError SF-SGLANG-PYTHON when no interpreter here has SGLang."""
    from specfleet.sglang.interpreter import find_python

    find_python(os.environ.get("SPECFLEET_SGLANG_PYTHON", ""))


def _addresses(site: Site) -> dict[str, str]:
    return {
        "coordinator": site.address(COORDINATOR),
        "gate": site.address(GATE),
        "nats": site.nats_url,
        "store": site.store_url,
        "coordinator-metrics": site.address(COORDINATOR, "coordinator-metrics"),
    }


def serve(options: UpOptions, *, report: Callable[[str], None], on_ready: Callable[[StackState], None]) -> None:
    """Runs the stack in this process until SIGTERM or SIGINT. Raises HostError when it cannot start."""
    state_dir = options.state_dir.resolve()
    try:
        state_dir.mkdir(parents=True, exist_ok=True)
        lock = StackLock(state_dir)
        owned = lock.acquire()
    except OSError as error:
        raise HostError("SF-STACK-STATE", f"state folder {state_dir} cannot be used: {error}") from error
    if not owned:
        raise HostError("SF-STACK-RUNNING", _running_message(state_dir))
    try:
        previous = read_state(state_dir)
        if previous is not None and (ended := end_leftovers(previous)):
            report(f"ended services left over from a supervisor that died: {', '.join(ended)}")
        if options.store == "mooncake":
            require_mooncake()
            require_memory(options.pool_bytes)
        if options.engine == "sglang":
            require_sglang()
        ports = Ports(
            port_names(options.store), wanted=options.ports, remembered=previous.ports if previous is not None else {}
        )
        try:
            _serve_on(state_dir, options, ports, report, on_ready)
        finally:
            ports.close()
    finally:
        lock.release()


def _serve_on(
    state_dir: Path,
    options: UpOptions,
    ports: Ports,
    report: Callable[[str], None],
    on_ready: Callable[[StackState], None],
) -> None:
    site = embedded_site(
        state_dir,
        ports.numbers,
        store=options.store,
        pool_bytes=options.pool_bytes,
        engine=options.engine,
        slots=options.slots,
    )
    for folder in site.data.values():
        Path(folder).mkdir(parents=True, exist_ok=True)
    state = StackState(
        store=options.store, pool_bytes=options.pool_bytes, ports=dict(ports.numbers), addresses=_addresses(site)
    )
    supervisor = Supervisor(stack(site), state, state_dir, report=report)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        for wanted in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(wanted, supervisor.stop)
        await supervisor.run(lambda: on_ready(state))

    asyncio.run(run())


def _running_message(state_dir: Path) -> str:
    state = read_state(state_dir)
    who = f" (pid {state.supervisor_pid}, {state.state})" if state else ""
    return f"a stack already runs in {state_dir}{who}; use it, stop it with specctl down, or choose another --state-dir"


def start_detached(options: UpOptions, *, with_parent: bool = False) -> StackState:
    """Starts the supervisor as a process of its own and waits until every service is ready.

    with_parent: the stack stops when this process dies, however it dies.

    Raises SpecfleetError with the supervisor's own code and message (and the failing service's last log lines).
    """
    state_dir = options.state_dir.resolve()
    (state_dir / "logs").mkdir(parents=True, exist_ok=True)
    reader, writer = os.pipe()
    command = [
        *(sys.executable, "-m", "specfleet.ctl", "up", "--state-dir", str(state_dir)),
        *("--store", options.store, "--pool", str(options.pool_bytes)),
        *("--engine", options.engine, "--slots", str(options.slots)),
        *("--ready-fd", str(writer)),
        *(part for name, number in options.ports.items() for part in ("--port", f"{name}={number}")),
        *(("--with-parent", str(os.getpid())) if with_parent else ()),
    ]
    with (state_dir / "logs" / "supervisor.log").open("ab") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, pass_fds=(writer,)
        )
    os.close(writer)
    try:
        with os.fdopen(reader) as pipe:
            answer: dict[str, Any] = json.loads(pipe.read() or "{}")
    except BaseException:
        # Interrupted while waiting: the half-started stack goes too.
        process.send_signal(signal.SIGTERM)
        process.wait()
        raise
    if answer.get("ready"):
        state = read_state(state_dir)
        assert state is not None
        return state
    process.wait()
    if "code" in answer:
        error = SpecfleetError(answer["code"], answer["message"])
        error.exit_code = answer["exit_code"]
        raise error
    raise HostError(
        "SF-STACK-START",
        f"the supervisor ended with {process.returncode}; the end of its log:\n{log_tail(state_dir, 'supervisor')}",
    )


def answer_starter(ready_fd: int, error: SpecfleetError | None) -> None:
    """Tells start_detached how it went, once."""
    document: dict[str, Any] = {"ready": True}
    if error is not None:
        exit_code = error.exit_code or EXIT_ENVIRONMENT
        document = {"code": error.code, "message": error.message, "exit_code": exit_code}
    with os.fdopen(ready_fd, "w") as pipe:
        json.dump(document, pipe)


def stop(state_dir: Path, timeout_s: float = STOP_TIMEOUT_S) -> bool:
    """Ordered stop of a running stack; False when none runs. Raises HostError SF-STACK-STOP when it does not end in time."""
    if not is_running(state_dir):
        state = read_state(state_dir)
        if state is not None:
            end_leftovers(state)
        return False
    deadline = time.monotonic() + timeout_s
    signalled = 0
    while is_running(state_dir):
        # A supervisor that took the lock a moment ago has not written its pid yet: read it again until it has.
        state = read_state(state_dir)
        if (
            state is not None
            and state.supervisor_pid != signalled
            and is_alive(state.supervisor_pid, state.supervisor_ticks)
        ):
            os.kill(state.supervisor_pid, signal.SIGTERM)
            signalled = state.supervisor_pid
        if time.monotonic() > deadline:
            raise HostError(
                "SF-STACK-STOP",
                f"the stack in {state_dir} has not stopped after {timeout_s:.0f} s (supervisor pid {signalled or 'unknown'}); "
                f"see {state_dir / 'logs'}",
            )
        time.sleep(0.05)
    return True
