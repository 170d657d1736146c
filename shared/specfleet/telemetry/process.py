"""The life of a service process: dying with its supervisor, stopping on a signal, ending with the right exit code."""

import asyncio
import ctypes
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, NoReturn

import structlog
import uvloop

from specfleet.contracts.errors import EXIT_FAILED, EXIT_OK, HostError, SpecfleetError

log = structlog.get_logger()

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent_pid: int | None = None) -> None:
    """Asks the kernel to send SIGTERM to this process when its parent dies (Linux; elsewhere a no-op).

    parent_pid: who the parent should be. If it died before this call the signal would never come, so it is raised now.
    The kernel means the parent *thread*: start children from a thread that lives as long as the supervisor.
    """
    if not sys.platform.startswith("linux"):
        return
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if parent_pid is not None and os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGTERM)


def dies_with(parent_pid: int, number: signal.Signals = signal.SIGTERM) -> Callable[[], None]:
    """A preexec_fn: the kernel sends the child a signal when this process (its starting thread, see above) dies.

    Execve keeps the death signal, so it covers programs that know nothing of it. Linux.
    """

    def arrange() -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
        if os.getppid() != parent_pid:  # the parent died between fork and prctl
            os._exit(1)

    return arrange


def stop_event() -> asyncio.Event:
    """An event that SIGTERM or SIGINT sets. Call inside the running loop; repeated signals change nothing."""
    event = asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop(received: signal.Signals) -> None:
        if not event.is_set():
            log.info("stopping", signal=received.name)
        event.set()

    for wanted in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(wanted, stop, wanted)
    return event


def run_service(main: Coroutine[Any, Any, int | None]) -> NoReturn:
    """Runs a service's main coroutine on uvloop and exits the process.

    Exit code: what the coroutine returns (None: 0); the error's exit_code for a SpecfleetError, logged in one line;
    1 for anything else, logged with its traceback; 130 for an interrupt before stop_event() was installed.
    """
    try:
        code = uvloop.run(main)
    except SpecfleetError as error:
        log.error(error.message, code=error.code, exit_code=error.exit_code)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except Exception:
        log.exception("the service failed unexpectedly", exit_code=EXIT_FAILED)
        sys.exit(EXIT_FAILED)
    sys.exit(EXIT_OK if code is None else code)


def own_folder(path: Path) -> Path:
    """Makes the folder in which a service keeps its files. Raises HostError SF-HOST-DATA-DIR when it cannot write there."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise HostError(
            "SF-HOST-DATA-DIR",
            f"--data-dir {path} cannot be written by user {os.getuid()}: {error}. Choose another folder, or change its owner",
        ) from error
    return path


def peak_rss_bytes(pid: int | None = None) -> int:
    """Largest resident set this process (or another, by pid) has had so far, in bytes; 0 when the other is gone."""
    try:
        with open(f"/proc/{pid or 'self'}/status", encoding="ascii", errors="replace") as status:
            for line in status:
                # VmHWM starts afresh at exec; ru_maxrss would begin with the parent's peak.
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    if pid is not None and pid != os.getpid():
        return 0
    # macOS counts bytes, every other system KiB.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
