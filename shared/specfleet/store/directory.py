"""A pool in a directory, for machines without Mooncake. Several processes may share it.

One file per object, raw bytes, at `{root}/{run}/{task}/a{attempt}/{feature}`. A file appears under its name only after
its bytes are on disk (temporary name, fsync, rename, fsync of the folder).
"""

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import numpy as np

from specfleet.contracts.errors import HostError, StoreError, StoreFullError
from specfleet.store.base import FeatureStore, StoreStats
from specfleet.store.tensors import Bytes, check_keys, checksum, lost, plan_specs, select_specs, tensor_view, verify
from specfleet.wire.records_pb2 import FeatureSpec, SampleRef, TaskAttempt

if TYPE_CHECKING:
    import torch

_TEMPORARY = ".tmp-"
# Names that no object can have: every object lies at least one folder deep.
_OPEN_LOCK, _USED = ".open", ".used"
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})


class DirectoryStore(FeatureStore):
    """Files under a root. The byte count all processes share is a small file, changed under an flock.

    Whoever opens the pool while nobody else has it open recounts it and deletes what a crash left half-written.
    """

    def __init__(self, root: Path, capacity_bytes: int | None = None) -> None:
        """capacity_bytes None: whatever the file system has room for."""
        self.name = root.name
        self.root = root
        self._capacity_bytes = capacity_bytes
        self._closed = False
        try:
            root.mkdir(parents=True, exist_ok=True)
            self._open_fd = os.open(root / _OPEN_LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise HostError("SF-HOST-STORE-DIR", f"cannot open the feature directory {root}: {error}") from error
        try:
            fcntl.flock(self._open_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass  # others have it open: the count is live
        else:
            self._recount()
        fcntl.flock(self._open_fd, fcntl.LOCK_SH)

    def put(self, attempt: TaskAttempt, tensors: Mapping[str, "torch.Tensor"]) -> list[FeatureSpec]:
        self._check_open()
        plan = plan_specs(self.name, attempt, tensors)
        for spec, data in plan:
            if self._path(spec.key).exists():
                raise StoreError("SF-STORE-KEY-EXISTS", f"{spec.key} is already stored; keys are written once")
            spec.checksum = checksum(data)
        needed = sum(spec.num_bytes for spec, _ in plan)
        self._reserve(needed)
        written: list[Path] = []
        try:
            for spec, data in plan:
                path = self._path(spec.key)
                self._write(path, data)
                written.append(path)
            for folder in {path.parent for path in written}:
                _fsync_folder(folder)
        except OSError as error:
            for path in written:
                path.unlink(missing_ok=True)
            self._change_used(-needed)
            message = f"cannot write {needed} bytes under {self.root}: {error}"
            if error.errno in _NO_ROOM:
                raise StoreFullError("SF-STORE-FULL", message) from error
            raise StoreError("SF-STORE-WRITE", message) from error
        return [spec for spec, _ in plan]

    def get(self, ref: SampleRef, names: Sequence[str] | None = None) -> dict[str, "torch.Tensor"]:
        self._check_open()
        tensors = {}
        for spec in select_specs(self.name, ref, names):
            try:
                data = np.fromfile(self._path(spec.key), dtype=np.uint8)
            except FileNotFoundError:
                raise lost(spec, "found none") from None
            except OSError as error:
                raise StoreError("SF-STORE-READ", f"cannot read {self._path(spec.key)}: {error}") from error
            verify(spec, data)
            tensors[spec.name] = tensor_view(spec, data)
        return tensors

    def remove(self, keys: Sequence[str]) -> list[str]:
        self._check_open()
        check_keys(self.name, keys)
        failed, freed, folders = [], 0, set()
        for key in keys:
            path = self._path(key)
            try:
                size = path.stat().st_size
                path.unlink()
            except FileNotFoundError:
                continue
            except OSError:
                failed.append(key)
                continue
            freed += size
            folders.add(path.parent)
        for folder in folders:
            # The attempt's and the task's folder go with their last object; the run's stays.
            with contextlib.suppress(OSError):
                folder.rmdir()
                folder.parent.rmdir()
        self._change_used(-freed)
        return failed

    def stats(self) -> StoreStats:
        self._check_open()
        with self._used() as fd:
            used = _read_count(fd)
        return StoreStats(capacity_bytes=self._capacity(used), used_bytes=used)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            os.close(self._open_fd)

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError("SF-STORE-CLOSED", f"store {self.name!r} is closed")

    def _path(self, key: str) -> Path:
        """Key → path below the root. Percent-encoding leaves no separator, and no part can be `.` or `..`."""
        parts = [quote(part, safe="") for part in key.split("/")[1:]]
        if not parts or any(part in ("", ".", "..") or part.startswith(_TEMPORARY) for part in parts):
            raise StoreError("SF-STORE-KEY", f"key {key!r} is not POOL/RUN/TASK/ATTEMPT/FEATURE")
        return self.root.joinpath(*parts)

    def _write(self, path: Path, data: Bytes) -> None:
        temporary = path.with_name(f"{_TEMPORARY}{secrets.token_hex(8)}")
        for _ in range(10):
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
                break
            except FileNotFoundError:
                continue  # a remover took the empty folder between mkdir and open
        else:
            raise OSError(errno.ENOENT, "the folder keeps vanishing", str(path.parent))
        try:
            with open(fd, "wb", buffering=0) as file:
                view = data.data
                while view:  # one write() moves at most 2 GiB
                    view = view[file.write(view) :]
                os.fsync(fd)
            os.rename(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def _capacity(self, used_bytes: int) -> int:
        if self._capacity_bytes is not None:
            return self._capacity_bytes
        return used_bytes + shutil.disk_usage(self.root).free

    def _reserve(self, needed_bytes: int) -> None:
        with self._used() as fd:
            used = _read_count(fd)
            capacity = self._capacity(used)
            if used + needed_bytes > capacity:
                raise StoreFullError(
                    "SF-STORE-FULL",
                    f"pool {self.name!r} at {self.root} holds {used} of {capacity} bytes; "
                    f"{needed_bytes} more do not fit",
                )
            _write_count(fd, used + needed_bytes)

    def _change_used(self, delta_bytes: int) -> None:
        if delta_bytes:
            with self._used() as fd:
                _write_count(fd, max(0, _read_count(fd) + delta_bytes))

    @contextlib.contextmanager
    def _used(self) -> Iterator[int]:
        """The count file, exclusively: an flock belongs to its descriptor, so a fresh one excludes threads too."""
        fd = os.open(self.root / _USED, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield fd
        finally:
            os.close(fd)

    def _recount(self) -> None:
        used = 0
        for folder, _, files in os.walk(self.root):
            for file in files:
                path = Path(folder, file)
                if file.startswith(_TEMPORARY):
                    path.unlink(missing_ok=True)
                elif Path(folder) != self.root:
                    used += path.stat().st_size
        with self._used() as fd:
            _write_count(fd, used)


def _read_count(fd: int) -> int:
    return int(os.pread(fd, 32, 0) or b"0")


def _write_count(fd: int, count: int) -> None:
    os.pwrite(fd, b"%020d" % count, 0)


def _fsync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
