"""The state folder of an embedded stack: `stack.json` (who runs where), `lock` (one supervisor at a time), `logs/`, `data/`.

The lock is an flock held by the supervisor for as long as it lives. Whether a stack runs is decided by the lock, never by a
pid that may have been given to another process; children are recognised by pid *and* kernel start time.
"""

import fcntl
import json
import os
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from specfleet.contracts.errors import HostError

FORMAT = 1
DEMO_STATE_DIR = Path("runs/demo/stack")


def default_state_dir() -> Path:
    """$SPECFLEET_STATE, or .specfleet in the current folder."""
    return Path(os.environ.get("SPECFLEET_STATE") or ".specfleet")


def running_state_dir(given: Path | None) -> Path:
    """Where a command that asks looks: the given folder, else the default one, or that of a demo which alone runs here."""
    folder = given or default_state_dir()
    if given is None and not is_running(folder) and is_running(DEMO_STATE_DIR):
        return DEMO_STATE_DIR
    return folder


@dataclass
class ServiceState:
    """One service as last seen by the supervisor. state: waiting, starting, ready, restarting, stopped, failed."""

    state: str = "waiting"
    pid: int = 0
    start_ticks: int = 0
    restarts: int = 0
    ports: dict[str, int] = field(default_factory=dict)
    since_unix: float = 0.0
    last_exit: int | None = None


@dataclass
class StackState:
    """What `stack.json` holds. state: starting, ready, stopping, stopped, failed."""

    state: str = "starting"
    message: str = ""
    supervisor_pid: int = 0
    supervisor_ticks: int = 0
    started_at_unix: float = 0.0
    store: str = "mooncake"
    pool_bytes: int = 0
    ports: dict[str, int] = field(default_factory=dict)
    addresses: dict[str, str] = field(default_factory=dict)
    services: dict[str, ServiceState] = field(default_factory=dict)
    format: int = FORMAT


def start_ticks(pid: int) -> int:
    """Kernel start time of a live process (field 22 of /proc/PID/stat); 0 when there is none. A zombie counts as none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    # The command name is in parentheses and may itself hold spaces and parentheses.
    fields = stat.rpartition(")")[2].split()
    return 0 if fields[0] in ("Z", "X") else int(fields[19])


def is_alive(pid: int, ticks: int) -> bool:
    """True while the very process that had this pid at that start time lives."""
    return pid > 0 and ticks > 0 and start_ticks(pid) == ticks


def write_state(state_dir: Path, state: StackState) -> None:
    """Atomic: a reader sees the old file or the new one."""
    handle, name = tempfile.mkstemp(prefix=".stack-", dir=state_dir)
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(asdict(state), file, indent=1)
        os.replace(name, state_dir / "stack.json")
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def read_state(state_dir: Path) -> StackState | None:
    """None when no stack was ever started here. Raises HostError SF-STACK-STATE when the file is not one of ours."""
    path = state_dir / "stack.json"
    try:
        document: dict[str, Any] = json.loads(path.read_text())
        if document.get("format") != FORMAT:
            raise ValueError(f"format {document.get('format')!r}, expected {FORMAT}")
        services = {name: ServiceState(**fields) for name, fields in document.pop("services").items()}
        return StackState(services=services, **document)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise HostError(
            "SF-STACK-STATE",
            f"{path} is not a stack file of this version ({error}); move it away or choose another --state-dir",
        ) from error


class StackLock:
    """Exclusive ownership of a state folder; released by the kernel when the holder dies, however it dies."""

    def __init__(self, state_dir: Path) -> None:
        self.path = state_dir / "lock"
        self._file: IO[str] | None = None

    def acquire(self) -> bool:
        file = self.path.open("a")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return False
        self._file = file
        return True

    def release(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def is_running(state_dir: Path) -> bool:
    """True while a supervisor owns the folder."""
    if not (state_dir / "lock").exists():
        return False
    lock = StackLock(state_dir)
    if lock.acquire():
        lock.release()
        return False
    return True


def log_tail(state_dir: Path, service: str, lines: int = 15) -> str:
    """The last lines of a service's log; empty when it wrote nothing."""
    path = state_dir / "logs" / f"{service}.log"
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 16384))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
    except OSError:
        return ""
