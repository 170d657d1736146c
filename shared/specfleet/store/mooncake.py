"""The tensor plane: FeatureStore over Mooncake. Every rule here answers a measured behaviour of Mooncake 0.3.13.

Put returns 0 for an existing key and keeps the old value, and 0 for one that a dead writer left half-written, which then
stays so: keys must be absent before and stored afterwards. Both are asked for a whole batch in one call; for lengths there
is none over shared memory, and one call a key takes longer than the put. Unpinned objects are evicted silently: everything
is pinned hard. A read that outlives its lease may return recycled memory: checksums decide.
"""

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from specfleet.contracts.errors import StoreError
from specfleet.store.arena import aligned
from specfleet.store.base import FeatureStore, PageLock, Sample, StoreStats
from specfleet.store.connection import (
    ABSENT,
    INVALID,
    LEASE_EXPIRED,
    Connection,
    Region,
    load_library,
    open_connection,
)
from specfleet.store.prefault import prefault
from specfleet.store.processes import master_command, owner_command, read_metrics
from specfleet.store.tensors import check_keys, lost, select_specs
from specfleet.store.transfer import BUFFER_WAIT_S, GONE, INLINE_BYTES, Read, groups_of
from specfleet.store.writing import Batch, Write
from specfleet.wire.records_pb2 import FeatureSpec, SampleRef, TaskAttempt

if TYPE_CHECKING:
    import torch

__all__ = ["MooncakeStore", "master_command", "owner_command", "prefault"]

DEFAULT_BUFFER_BYTES = 256 << 20
_BACKOFF_FIRST_S, _BACKOFF_MAX_S = 0.1, 2.0
_CLOSE_WAIT_S = 60.0
_REMOVE_BATCH = 1024


class MooncakeStore(FeatureStore):
    """Objects in a Mooncake pool. Connects at the first call and again, with back-off, after master or owner died."""

    def __init__(
        self,
        name: str,
        master: str,
        client: str | None = None,
        buffer_bytes: int | None = None,
        metrics: str | None = None,
        capacity_bytes: int | None = None,
    ) -> None:
        """master, client (the owner's shared-memory service on this host), metrics: HOST:PORT.

        buffer_bytes is this process's transfer memory; one object may fill half of it. capacity_bytes is what stats()
        falls back to when the master's metrics cannot be read.
        """
        self.name = name
        self._master, self._client_address, self._metrics = master, client, metrics
        half = aligned((buffer_bytes or DEFAULT_BUFFER_BYTES) // 2)
        self._region = Region(staging_bytes=half, lent_bytes=half)
        self._capacity_bytes = capacity_bytes
        self._library = load_library()
        self._config = self._library.ReplicateConfig()
        self._config.with_hard_pin = True
        self._connection: Connection | None = None
        self._connecting = threading.Lock()
        self._idle = threading.Condition()
        self._active = 0
        self._closing = threading.Event()
        self._failures = 0
        self._retry_at = 0.0
        # Keys of failed puts that could not be deleted at the time.
        self._orphans: set[str] = set()
        self._movers = ThreadPoolExecutor(max_workers=4, thread_name_prefix=f"store-{name}")

    def reserve(self, num_bytes: int, page_lock: PageLock) -> None:
        """Transfer memory that is lent, beside what copies need; connects."""
        self._region = Region(self._region.staging_bytes, max(self._region.lent_bytes, aligned(num_bytes)), page_lock)
        with self._session():
            pass

    def empty(self, shape: Sequence[int], dtype: "torch.dtype") -> "torch.Tensor":
        """Uninitialised memory that put() transfers without a copy; ordinary memory when none is free or no call has
        connected yet. Never waits."""
        import torch

        num_bytes = math.prod(shape) * dtype.itemsize
        connection = self._connection
        if num_bytes and connection is not None:
            data = connection.lend(num_bytes)
            if data is not None:
                return torch.from_numpy(data).view(dtype).reshape(tuple(shape))
        return super().empty(shape, dtype)

    def put(self, attempt: TaskAttempt, tensors: "Mapping[str, torch.Tensor]") -> list[FeatureSpec]:
        [outcome] = self.put_many([(attempt, tensors)])
        if isinstance(outcome, StoreError):
            raise outcome
        return outcome

    def put_many(self, samples: Sequence[Sample]) -> list[list[FeatureSpec] | StoreError]:
        """All in one transfer. Where the connection breaks, every sample fails."""
        writes = [Write(self.name, sample) for sample in samples]
        try:
            with self._session() as connection:
                self._put(connection, writes)
        except StoreError as error:
            for write in writes:
                write.error = write.error or error
        return [write.outcome for write in writes]

    def _put(self, connection: Connection, writes: list[Write]) -> None:
        self._delete_orphans(connection)
        batch = Batch(connection, writes, self._broken)
        batch.refuse()
        written = [write for write in writes if write.error is None]
        failed = written
        try:
            batch.write(self._config, self._run)
            batch.check()
            failed = [write for write in written if write.error is not None]
        finally:
            left = self._delete(connection, [key for write in failed for key in write.keys])
            with self._idle:
                self._orphans.update(left)

    def get(self, ref: SampleRef, names: Sequence[str] | None = None) -> "dict[str, torch.Tensor]":
        specs = select_specs(self.name, ref, names)
        with self._session() as connection:
            return self._read(connection, specs)

    def remove(self, keys: Sequence[str]) -> list[str]:
        check_keys(self.name, keys)
        if not keys:
            return []
        with self._session() as connection:
            return self._delete(connection, keys)

    def stats(self) -> StoreStats:
        """What the master reports over all pools it serves. Used is 0 where only the configured capacity is known."""
        if self._metrics is not None:
            with contextlib.suppress(OSError, KeyError):
                metrics = read_metrics(self._metrics)
                return StoreStats(int(metrics["master_total_capacity_bytes"]), int(metrics["master_allocated_bytes"]))
        if self._capacity_bytes is None:
            raise StoreError(
                "SF-STORE-NO-STATS",
                f"the Mooncake master's metrics at {self._metrics} cannot be read; set metrics=HOST:PORT "
                "(and pool=BYTES as a fallback) in the store URL",
            )
        return StoreStats(self._capacity_bytes, 0)

    def close(self) -> None:
        """Waits for calls in flight. Tensors handed out stay valid."""
        self._closing.set()
        with self._idle:
            self._idle.wait_for(lambda: self._active == 0, timeout=_CLOSE_WAIT_S)
            connection, self._connection = self._connection, None
        self._movers.shutdown(wait=True)
        if connection is not None:
            connection.close()

    # Connecting

    @contextlib.contextmanager
    def _session(self) -> Iterator[Connection]:
        """A working connection for one call; counts the call so that close() can wait for it."""
        with self._idle:
            self._check_open()
            self._active += 1
        try:
            yield self._connect()
            self._failures = 0
        finally:
            with self._idle:
                self._active -= 1
                self._idle.notify_all()

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise StoreError("SF-STORE-CLOSED", f"store {self.name!r} is closed")

    def _connect(self) -> Connection:
        with self._connecting:
            if self._connection is None:
                self._closing.wait(self._retry_at - time.monotonic())
                self._check_open()
                try:
                    self._connection = open_connection(
                        self._library, self._master, self._client_address, self._region, f"{self.name}/.probe"
                    )
                except StoreError:
                    self._back_off()
                    raise
            return self._connection

    def _back_off(self) -> None:
        self._retry_at = time.monotonic() + min(_BACKOFF_MAX_S, _BACKOFF_FIRST_S * 2**self._failures)
        self._failures = min(self._failures + 1, 16)

    def _broken(self, connection: Connection, what: str, code: int) -> StoreError:
        """Retires the connection and its memory; returns the error to raise."""
        connection.retired = True
        with self._connecting:
            if self._connection is connection:
                self._connection = None
                self._back_off()
        return StoreError(
            "SF-STORE-TRANSFER",
            f"Mooncake {what} returned {code} (master {self._master}, owner {self._client_address or 'remote'}); "
            "the connection is replaced at the next call",
        )

    # Reading

    def _read(self, connection: Connection, specs: list[FeatureSpec]) -> "dict[str, torch.Tensor]":
        """Verifies one group while the next is transferred."""
        groups = groups_of([spec.num_bytes for spec in specs], connection)
        tensors: dict[str, torch.Tensor] = {}
        pending: list[Read] = []
        try:
            for group in groups:
                read = Read([specs[index] for index in group], connection)
                if not read.reserve(wait_s=0.0 if pending else BUFFER_WAIT_S):
                    # Waiting while holding memory could deadlock two readers: give back first.
                    tensors |= self._finish_read(pending.pop(), connection)
                    read.reserve(wait_s=BUFFER_WAIT_S)
                read.codes = self._run(read.transfer, inline=len(groups) == 1 and read.num_bytes <= INLINE_BYTES)
                pending.append(read)
                if len(pending) > 1:
                    tensors |= self._finish_read(pending.pop(0), connection)
            while pending:
                tensors |= self._finish_read(pending.pop(0), connection)
        finally:
            for read in pending:  # only after an error: nobody leaves while a transfer writes into lent memory
                with contextlib.suppress(Exception):
                    read.release(read.codes())
        return tensors

    def _finish_read(self, read: Read, connection: Connection) -> "dict[str, torch.Tensor]":
        codes = read.codes()
        try:
            for spec, code in zip(read.specs, codes, strict=True):
                self._check_get(connection, spec, code)
            return read.tensors()
        finally:
            read.release(codes)

    def _check_get(self, connection: Connection, spec: FeatureSpec, code: int) -> None:
        if code == spec.num_bytes:
            return
        if code == INVALID:
            # Longer than the reference says; or the owner restarted and does not know this process's memory.
            found = connection.client.get_size(spec.key)
            if found > spec.num_bytes:
                raise lost(spec, f"found {found}")
        if code >= 0:
            raise lost(spec, f"found {code}")
        if code in GONE:
            raise lost(spec, f"found none (code {code})")
        if code == LEASE_EXPIRED:
            raise StoreError("SF-STORE-SLOW-READ", f"reading {spec.key} took longer than its lease; read it again")
        raise self._broken(connection, f"get of {spec.key}", code)

    # Deleting

    def _delete(self, connection: Connection, keys: Sequence[str]) -> list[str]:
        """Forced: a reader's lease must not keep what the ledger has let go. Returns the keys still there."""
        failed = []
        for start in range(0, len(keys), _REMOVE_BATCH):
            batch = list(keys[start : start + _REMOVE_BATCH])
            codes = connection.client.batch_remove(batch, True)
            failed += [key for key, code in zip(batch, codes, strict=True) if code not in (0, ABSENT)]
        return failed

    def _delete_orphans(self, connection: Connection) -> None:
        with self._idle:
            orphans, self._orphans = self._orphans, set()
        if orphans:
            left = self._delete(connection, sorted(orphans))
            with self._idle:
                self._orphans.update(left)

    def _run(self, call: Callable[[], list[int]], inline: bool) -> Callable[[], list[int]]:
        if inline:
            result = call()
            return lambda: result
        return self._movers.submit(call).result
