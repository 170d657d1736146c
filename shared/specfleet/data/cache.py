"""The user's cache: where it lies, a lock between processes, hashes of large files, atomic directories."""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from specfleet.contracts.errors import HostError

# A file changed this recently may change again without its mtime moving (coarse clocks): its hash is not kept.
_RACY_S = 2.0


def cache_dir() -> Path:
    """$SPECFLEET_CACHE, else $XDG_CACHE_HOME/specfleet, else ~/.cache/specfleet. Not created."""
    if own := os.environ.get("SPECFLEET_CACHE"):
        return Path(own).expanduser()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg).expanduser() / "specfleet"
    return Path.home() / ".cache" / "specfleet"


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Holds a lock file for the block; a second process waits. The kernel frees it when its holder dies."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise HostError(
            "SF-HOST-CACHE",
            f"{path.parent} cannot be written: {error}. Set SPECFLEET_CACHE, --out or deployment.output_dir",
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def published(final: Path) -> Iterator[Path]:
    """A scratch directory that becomes `final` in one rename when the block ends well, and vanishes when it does not.

    Files and the directory are flushed first, so that a directory which exists is whole. Callers hold `exclusive` on a
    lock of `final`: then a scratch directory found here is what a killed process left, and is removed.
    """
    scratch = final.parent / f".{final.name}.partial"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        yield scratch
        for path in (*scratch.iterdir(), scratch):
            fsync(path)
        scratch.rename(final)
        fsync(final.parent)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def sha256_file(path: Path) -> str:
    """sha256 (hex) of a file's contents, remembered per (real path, size, mtime): 16 GB of weights are read once."""
    path = path.resolve()
    stat = path.stat()
    identity = {"path": str(path), "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    memo = cache_dir() / "hashes" / f"{hashlib.sha256(str(path).encode()).hexdigest()[:32]}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        known = json.loads(memo.read_text())
        if {key: known[key] for key in identity} == identity:
            return str(known["sha256"])
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if time.time() - stat.st_mtime > _RACY_S:
        # The memo only saves time: a cache that cannot be written costs the time, not the run.
        with contextlib.suppress(OSError):
            memo.parent.mkdir(parents=True, exist_ok=True)
            partial = memo.with_suffix(f".{os.getpid()}.partial")
            partial.write_text(json.dumps({**identity, "sha256": digest}))
            partial.replace(memo)
    return digest


def fsync(path: Path) -> None:
    """Flushes a file or a folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
