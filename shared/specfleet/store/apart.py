"""A store in a process of its own, with memory that both share: a call costs this process one message.

For a thread that stores beside one that must not wait. In one process they take turns at Python's lock, and each turn costs
the other: a store's many short calls slow down a thread that launches kernels far more than the time they take.
"""

import contextlib
import math
import mmap
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from multiprocessing.reduction import recv_handle, send_handle
from typing import TYPE_CHECKING, Any

import numpy as np

from specfleet.contracts import errors
from specfleet.contracts.errors import SpecfleetError, StoreError
from specfleet.store.arena import Arena, aligned
from specfleet.store.base import FeatureStore, PageLock, Sample, StoreStats
from specfleet.store.factory import open_store
from specfleet.store.tensors import Block, Bytes, byte_view, dtype_name, hash_seconds, hashed_elsewhere
from specfleet.wire.records_pb2 import FeatureSpec, SampleRef, TaskAttempt

if TYPE_CHECKING:
    import torch

_CLOSE_WAIT_S = 10.0

_Told = tuple[str, str, tuple[int, ...], int | bytes]
"""A tensor in a message: name, dtype, shape, and its place in the shared memory or its bytes."""


@dataclass(frozen=True)
class _Shared:
    """A part of a file in memory, mapped."""

    file: int
    first: int
    num_bytes: int
    base: int
    """Address of the part in this process."""
    owner: object
    """Keeps the mapping."""

    @classmethod
    def mapped(cls, file: int, first: int, num_bytes: int) -> "_Shared":
        start = first - first % mmap.ALLOCATIONGRANULARITY
        mapping = mmap.mmap(file, first - start + num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, offset=start)
        data = np.frombuffer(mapping, np.uint8)[first - start :]
        return cls(file, first, num_bytes, data.ctypes.data, data)

    @classmethod
    def made(cls, num_bytes: int) -> "_Shared":
        file = os.memfd_create("specfleet")
        os.ftruncate(file, num_bytes)
        return cls.mapped(file, 0, num_bytes)

    def bytes(self, place: int, num_bytes: int) -> Bytes:
        return Block(self.base + place, num_bytes, self.owner).bytes()


class StoreApart(FeatureStore):
    """The store of `url`, as its own process opens it. One call at a time.

    A process that ended fails the calls under way (SF-STORE-PROCESS); the next call starts another.
    """

    def __init__(self, url: str) -> None:
        with contextlib.closing(open_store(url)) as store:
            self.name = store.name
        self._url = url
        self._calling = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._memory: _Shared | None = None
        self._arena: Arena | None = None
        self._unlock = lambda: None
        self._closed = False

    def reserve(self, num_bytes: int, page_lock: PageLock) -> None:
        """Memory that the store lends its process, or else some that puts copy from."""
        with self._calling:
            first, size = self._ask("reserve", aligned(num_bytes))
            assert self._connection is not None
            memory = _Shared.mapped(recv_handle(self._connection), first, size)
        self._unlock = page_lock(memory.base, size)
        self._memory, self._arena = memory, Arena(memory.base, size)

    def empty(self, shape: Sequence[int], dtype: "torch.dtype") -> "torch.Tensor":
        import torch

        num_bytes = math.prod(shape) * dtype.itemsize
        arena, memory = self._arena, self._memory
        address = arena.try_acquire(num_bytes) if arena is not None and num_bytes else None
        if arena is None or memory is None or address is None:
            return super().empty(shape, dtype)
        block = Block(address, num_bytes, memory)
        weakref.finalize(block, arena.release_later, address).atexit = False
        return torch.from_numpy(block.bytes()).view(dtype).reshape(tuple(shape))

    def put(self, attempt: TaskAttempt, tensors: "Mapping[str, torch.Tensor]") -> list[FeatureSpec]:
        [outcome] = self.put_many([(attempt, tensors)])
        if isinstance(outcome, StoreError):
            raise outcome
        return outcome

    def put_many(self, samples: Sequence[Sample]) -> list[list[FeatureSpec] | StoreError]:
        told: list[tuple[bytes, list[_Told]]] = []
        outcomes: list[list[FeatureSpec] | StoreError | None] = []
        for attempt, tensors in samples:
            try:
                told.append((attempt.SerializeToString(), [self._told(*item) for item in tensors.items()]))
                outcomes.append(None)
            except StoreError as error:
                outcomes.append(error)
        found: Iterator[list[FeatureSpec] | StoreError]
        try:
            results, hash_s = self._call("put", told)
            hashed_elsewhere(hash_s)
            found = iter([_outcome(result) for result in results])
        except StoreError as error:
            found = iter([error] * len(told))
        return [next(found) if outcome is None else outcome for outcome in outcomes]

    def get(self, ref: SampleRef, names: Sequence[str] | None = None) -> "dict[str, torch.Tensor]":
        told: list[_Told] = self._call("get", (ref.SerializeToString(), names))
        return {item[0]: _tensor(item, None) for item in told}

    def remove(self, keys: Sequence[str]) -> list[str]:
        left: list[str] = self._call("remove", list(keys))
        return left

    def stats(self) -> StoreStats:
        return StoreStats(*self._call("stats", None))

    def close(self) -> None:
        with self._calling:
            if self._closed:
                return
            self._closed = True
            self._end()
            self._unlock()
            if self._memory is not None:
                os.close(self._memory.file)

    def _told(self, name: str, tensor: "torch.Tensor") -> _Told:
        address, memory = tensor.data_ptr(), self._memory
        if memory is not None and tensor.is_contiguous() and memory.base <= address < memory.base + memory.num_bytes:
            return name, dtype_name(tensor.dtype), tuple(tensor.shape), address - memory.base
        return name, dtype_name(tensor.dtype), tuple(tensor.shape), byte_view(name, tensor).tobytes()

    def _call(self, what: str, argument: Any) -> Any:
        with self._calling:
            return self._ask(what, argument)

    def _ask(self, what: str, argument: Any) -> Any:
        if self._closed:
            raise StoreError("SF-STORE-CLOSED", f"store {self.name!r} is closed")
        try:
            connection = self._connection or self._start()
            connection.send((what, argument))
            good, result = connection.recv()
        except (EOFError, OSError) as error:
            self._end()
            raise StoreError(
                "SF-STORE-PROCESS",
                f"the process of store {self.name!r} ended ({error!r}); the next call starts another",
            ) from error
        if not good:
            raise _error(result)
        return result

    def _start(self) -> Connection:
        ours, theirs = Pipe()
        with theirs:
            environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
            command = [sys.executable, "-m", "specfleet.store.apart", str(theirs.fileno()), self._url]
            self._process = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()])
        self._connection = ours
        if self._memory is not None:  # of an earlier process
            ours.send(("adopt", (self._memory.first, self._memory.num_bytes)))
            send_handle(ours, self._memory.file, self._process.pid)
        return ours

    def _end(self) -> None:
        if self._connection is not None:
            self._connection.close()  # which ends the process
            self._connection = None
        if self._process is not None:
            try:
                self._process.wait(_CLOSE_WAIT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None


def _outcome(result: tuple[str, ...] | list[bytes]) -> list[FeatureSpec] | StoreError:
    if isinstance(result, tuple):
        error = _error(result)
        return error if isinstance(error, StoreError) else StoreError(error.code, error.message)
    return [FeatureSpec.FromString(spec) for spec in result]


def _error(told: tuple[str, ...]) -> SpecfleetError:
    kind, code, message = told
    error: SpecfleetError = getattr(errors, kind)(code, message)
    return error


def _tensor(told: _Told, memory: _Shared | None) -> "torch.Tensor":
    import torch

    _, dtype_of, shape, where = told
    dtype = getattr(torch, dtype_of)
    if isinstance(where, bytes):
        data = np.frombuffer(bytearray(where), np.uint8)
    else:
        assert memory is not None
        data = memory.bytes(where, math.prod(shape) * dtype.itemsize)
    return torch.from_numpy(data).view(dtype).reshape(shape)


# In the store's process


class _Server:
    def __init__(self, connection: Connection, url: str) -> None:
        self._connection = connection
        self._store = open_store(url)
        self._memory: _Shared | None = None

    def run(self) -> None:
        """Until the other side is gone."""
        with contextlib.closing(self._store):
            while True:
                try:
                    what, argument = self._connection.recv()
                    if what == "adopt":
                        self._memory = _Shared.mapped(recv_handle(self._connection), *argument)
                        continue
                    answer = self._answer(what, argument)
                    self._connection.send(answer)
                    if what == "reserve" and answer[0]:
                        assert self._memory is not None
                        send_handle(self._connection, self._memory.file, os.getppid())
                except (EOFError, OSError):
                    return

    def _answer(self, what: str, argument: Any) -> tuple[bool, Any]:
        try:
            return True, getattr(self, what)(argument)
        except SpecfleetError as error:
            return False, (type(error).__name__, error.code, error.message)
        except Exception as error:
            return False, ("StoreError", "SF-STORE-PROCESS", f"{type(error).__name__}: {error}")

    def reserve(self, num_bytes: int) -> tuple[int, int]:
        import torch

        self._store.reserve(num_bytes, lambda _address, _num_bytes: lambda: None)
        lent = self._store.empty([num_bytes], torch.uint8)
        self._memory = _file_behind(lent.data_ptr(), num_bytes, lent) or _Shared.made(num_bytes)
        return self._memory.first, num_bytes

    def put(self, samples: list[tuple[bytes, list[_Told]]]) -> tuple[list[Any], float]:
        before = hash_seconds()
        outcomes = self._store.put_many(
            [
                (TaskAttempt.FromString(attempt), {item[0]: _tensor(item, self._memory) for item in told})
                for attempt, told in samples
            ]
        )
        results: list[Any] = [
            (type(outcome).__name__, outcome.code, outcome.message)
            if isinstance(outcome, StoreError)
            else [spec.SerializeToString() for spec in outcome]
            for outcome in outcomes
        ]
        return results, hash_seconds() - before

    def get(self, argument: tuple[bytes, Sequence[str] | None]) -> list[_Told]:
        ref, names = argument
        return [
            (name, dtype_name(tensor.dtype), tuple(tensor.shape), byte_view(name, tensor).tobytes())
            for name, tensor in self._store.get(SampleRef.FromString(ref), names).items()
        ]

    def remove(self, keys: list[str]) -> list[str]:
        return self._store.remove(keys)

    def stats(self, _: None) -> tuple[int, int]:
        stats = self._store.stats()
        return stats.capacity_bytes, stats.used_bytes


def _file_behind(address: int, num_bytes: int, owner: object) -> _Shared | None:
    """The open file that is mapped, shared, at [address, address + num_bytes); None for other memory. Linux."""
    with open("/proc/self/maps", encoding="ascii", errors="replace") as maps:
        for line in maps:
            span, permissions, offset, _, inode, *_ = line.split()
            start, end = (int(part, 16) for part in span.split("-"))
            if start <= address and address + num_bytes <= end and permissions.endswith("s"):
                file = _open_file(int(inode))
                if file is not None:
                    return _Shared(file, int(offset, 16) + address - start, num_bytes, address, owner)
    return None


def _open_file(inode: int) -> int | None:
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.fstat(int(name)).st_ino == inode:
                return int(name)
    return None


def main() -> None:
    file, url = sys.argv[1:]
    _Server(Connection(int(file)), url).run()


if __name__ == "__main__":
    main()
