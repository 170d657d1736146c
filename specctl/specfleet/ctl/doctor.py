"""Checks of this machine: what `specctl up` needs, what is missing, and what to do about it.

Each check is a small function that returns a Finding and never raises. Heavy packages are asked for their version through
their metadata; nothing here imports torch.
"""

import ctypes
import importlib.metadata
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from specfleet.ctl.output import human_bytes

GIB = 1 << 30
# The demo's peak: pool, target twice, draft with optimizer state, and the Python processes around them.
WANTED_MEMORY, NEEDED_MEMORY = 12 * GIB, 6 * GIB
WANTED_DISK, NEEDED_DISK = 5 * GIB, 2 * GIB


@dataclass(frozen=True)
class Finding:
    """level: ok, warn (works, less well), fail (the embedded stack cannot run), info."""

    name: str
    level: Literal["ok", "warn", "fail", "info"]
    found: str
    remedy: str = ""


def _python(_: Path) -> Finding:
    found = sys.version.split()[0]
    if not sys.platform.startswith("linux"):
        return Finding("python", "fail", f"{found} on {sys.platform}", "the embedded stack needs Linux")
    return Finding("python", "ok", found)


def _cores(_: Path) -> Finding:
    cores = len(os.sched_getaffinity(0))
    return (
        Finding("cores", "ok", str(cores))
        if cores >= 2
        else Finding("cores", "warn", "1", "2 cores or more train faster")
    )


def available_memory() -> int:
    """Bytes of memory a new process may still use: /proc/meminfo, and the control group's limit where there is one."""
    meminfo = Path("/proc/meminfo").read_text().splitlines()
    found = next((int(line.split()[1]) * 1024 for line in meminfo if line.startswith("MemAvailable:")), 0)
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(limit).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            found = min(found, int(text))
    return found


def _memory(_: Path) -> Finding:
    found = available_memory()
    text = f"{human_bytes(found)} available"
    if found < NEEDED_MEMORY:
        return Finding("memory", "fail", text, f"free memory: the demo needs {human_bytes(NEEDED_MEMORY)}")
    if found < WANTED_MEMORY:
        return Finding("memory", "warn", text, f"{human_bytes(WANTED_MEMORY)} are comfortable; stop other programs")
    return Finding("memory", "ok", text)


def _disk(folder: Path) -> Finding:
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    text = f"{human_bytes(free)} free at {existing}"
    if free < NEEDED_DISK:
        return Finding("disk", "fail", text, f"{human_bytes(NEEDED_DISK)} are needed")
    return Finding("disk", "ok" if free >= WANTED_DISK else "warn", text)


def _writable(folder: Path) -> Finding:
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            return Finding("write access", "ok", str(existing))
    except OSError as error:
        return Finding("write access", "fail", f"{existing}: {error}", "choose another --state-dir")


def _libibverbs(_: Path) -> Finding:
    try:
        ctypes.CDLL("libibverbs.so.1")
    except OSError as error:
        remedy = "apt-get install libibverbs1, or keep features in files: specctl up --store directory"
        return Finding("libibverbs1", "fail", str(error), remedy)
    return Finding("libibverbs1", "ok", "found")


def _mooncake(_: Path) -> Finding:
    for package in ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine", "mooncake-transfer-engine-cuda13"):
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        # In a process of its own: a broken shared library can take the interpreter down.
        command = [sys.executable, "-c", "import mooncake.store"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            return Finding(
                "mooncake", "fail", f"{package} {version}: {last}", "see libibverbs1; or use --store directory"
            )
        return Finding("mooncake", "ok", f"{package} {version}")
    return Finding(
        "mooncake", "fail", "not installed", "pip install 'specfleet[mooncake-cpu]', or use --store directory"
    )


def _program(program: str, extra: str) -> Callable[[Path], Finding]:
    def check(_: Path) -> Finding:
        beside = Path(sys.executable).parent / program
        found = str(beside) if os.access(beside, os.X_OK) else shutil.which(program)
        if found is None:
            return Finding(program, "fail", "not found", f"pip install '{extra}'")
        return Finding(program, "ok", found)

    return check


def _ports(_: Path) -> Finding:
    try:
        with socket.socket() as server, socket.socket() as client:
            server.bind(("127.0.0.1", 0))
            server.listen(1)
            client.settimeout(2)
            client.connect(server.getsockname())
    except OSError as error:
        return Finding("loopback ports", "fail", str(error), "allow programs to listen on 127.0.0.1")
    return Finding("loopback ports", "ok", "can listen and connect")


def _package(package: str, at_least: str, extra: str) -> Callable[[Path], Finding]:
    def check(_: Path) -> Finding:
        try:
            found = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return Finding(package, "fail", "not installed", f"pip install '{extra}'")
        if release(found) < release(at_least):
            return Finding(package, "fail", found, f"pip install -U '{package}>={at_least}'")
        return Finding(package, "ok", found)

    return check


def release(version: str) -> tuple[int, ...]:
    """'2.13.0+cpu' → (2, 13, 0): the leading numbers, enough to compare with a lower bound."""
    numbers = []
    for part in version.split("+")[0].split("."):
        digits = "".join(c for i, c in enumerate(part) if part[: i + 1].isdigit())
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)


def _generated_code(_: Path) -> Finding:
    """Generated code refuses a runtime older than the generator; importing it asks exactly that."""
    try:
        import google.protobuf
        import grpc

        import specfleet.wire.run_pb2_grpc  # noqa: F401
    except Exception as error:
        remedy = "pip install -U 'specfleet'; in a checkout: make proto"
        return Finding("wire code", "fail", " ".join(str(error).split())[:200], remedy)
    return Finding("wire code", "ok", f"grpc {grpc.__version__}, protobuf {google.protobuf.__version__}")


def _accelerator(_: Path) -> Finding:
    program = shutil.which("nvidia-smi")
    if program is None:
        return Finding("accelerator", "info", "none found; everything runs on the CPU")
    command = [program, "--query-gpu=name,memory.total", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    found = "; ".join(done.stdout.strip().splitlines())
    return Finding("accelerator", "info", found or f"nvidia-smi says: {done.stderr.strip()[:120]}")


def _sglang(_: Path) -> Finding:
    from specfleet.contracts.errors import HostError
    from specfleet.sglang.interpreter import find_python, sglang_version

    given = os.environ.get("SPECFLEET_SGLANG_PYTHON", "")
    try:
        python = find_python(given)
        return Finding("sglang", "info", f"{sglang_version(python)} in {python}")
    except HostError as error:
        return Finding("sglang", "info", error.message if given else "not installed; the hf engine captures")


# Checks that only the Mooncake store needs: with --store directory they do not count.
MOONCAKE_CHECKS: tuple[Callable[[Path], Finding], ...] = (
    _libibverbs,
    _mooncake,
    _program("mooncake_master", "specfleet[mooncake-cpu]"),
    _program("mooncake_client", "specfleet[mooncake-cpu]"),
)
CHECKS: tuple[Callable[[Path], Finding], ...] = (
    _python,
    _cores,
    _memory,
    _disk,
    _writable,
    _ports,
    _program("nats-server", "specfleet[local]"),
    _program("specfleet-coordinator", "specfleet[local]"),
    _generated_code,
    _package("sqlalchemy", "2.0.36", "specfleet[coordinator]"),
    _package("pyarrow", "18", "specfleet[coordinator]"),
    _package("torch", "2.9", "specfleet[capture,trainer,gate]"),
    _package("transformers", "5.5", "specfleet[capture,trainer,gate]"),
    _accelerator,
    _sglang,
)


def examine(folder: Path, store: str = "mooncake") -> list[Finding]:
    """Every check, in order. folder: the state folder that disk space and write access are asked about."""
    checks = (*CHECKS, *(MOONCAKE_CHECKS if store == "mooncake" else ()))
    return [_guarded(check, folder.resolve()) for check in checks]


def _guarded(check: Callable[[Path], Finding], folder: Path) -> Finding:
    try:
        return check(folder)
    except Exception as error:
        name = getattr(check, "__name__", "check").strip("_")
        return Finding(name, "fail", f"{type(error).__name__}: {error}", "this check itself failed; please report it")
