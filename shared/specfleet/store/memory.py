"""The in-memory twin: same promises as Mooncake, inside one process. For tests and single-process tools."""

import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from specfleet.contracts.errors import StoreError, StoreFullError
from specfleet.store.base import FeatureStore, StoreStats
from specfleet.store.tensors import Bytes, check_keys, checksum, lost, plan_specs, select_specs, tensor_view, verify
from specfleet.wire.records_pb2 import FeatureSpec, SampleRef, TaskAttempt

if TYPE_CHECKING:
    import torch

# Enough for tests and small runs; a pool that grows without bound would hide missing back-pressure.
DEFAULT_CAPACITY_BYTES = 1 << 30


class MemoryPool:
    """Objects of one pool. Every MemoryStore opened under the same name in this process shares one."""

    def __init__(self, name: str, capacity_bytes: int) -> None:
        self.name = name
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.openers = 0
        self.objects: dict[str, Bytes] = {}
        self.lock = threading.Lock()


# A pool lives as long as a store is open on it.
_POOLS: dict[str, MemoryPool] = {}
_POOLS_LOCK = threading.Lock()


class MemoryStore(FeatureStore):
    """Bytes in a dict under a lock. Reads are copies: what a caller does to a tensor never reaches the pool."""

    def __init__(self, name: str, capacity_bytes: int = DEFAULT_CAPACITY_BYTES) -> None:
        self.name = name
        with _POOLS_LOCK:
            pool = _POOLS.get(name)
            if pool is None:
                pool = _POOLS[name] = MemoryPool(name, capacity_bytes)
            pool.openers += 1
        self._pool: MemoryPool | None = pool

    def put(self, attempt: TaskAttempt, tensors: Mapping[str, "torch.Tensor"]) -> list[FeatureSpec]:
        pool = self._open()
        plan = plan_specs(self.name, attempt, tensors)
        for spec, data in plan:
            spec.checksum = checksum(data)
        with pool.lock:
            for spec, _ in plan:
                if spec.key in pool.objects:
                    raise StoreError("SF-STORE-KEY-EXISTS", f"{spec.key} is already stored; keys are written once")
            needed = sum(spec.num_bytes for spec, _ in plan)
            if pool.used_bytes + needed > pool.capacity_bytes:
                raise StoreFullError(
                    "SF-STORE-FULL",
                    f"pool {self.name!r} holds {pool.used_bytes} of {pool.capacity_bytes} bytes; "
                    f"{needed} more do not fit",
                )
            for spec, data in plan:
                pool.objects[spec.key] = np.array(data)
            pool.used_bytes += needed
        return [spec for spec, _ in plan]

    def get(self, ref: SampleRef, names: Sequence[str] | None = None) -> dict[str, "torch.Tensor"]:
        pool = self._open()
        tensors = {}
        for spec in select_specs(self.name, ref, names):
            with pool.lock:
                stored = pool.objects.get(spec.key)
            if stored is None:
                raise lost(spec, "found none")
            data = stored.copy()
            verify(spec, data)
            tensors[spec.name] = tensor_view(spec, data)
        return tensors

    def remove(self, keys: Sequence[str]) -> list[str]:
        pool = self._open()
        check_keys(self.name, keys)
        with pool.lock:
            for key in keys:
                stored = pool.objects.pop(key, None)
                if stored is not None:
                    pool.used_bytes -= stored.nbytes
        return []

    def stats(self) -> StoreStats:
        pool = self._open()
        return StoreStats(capacity_bytes=pool.capacity_bytes, used_bytes=pool.used_bytes)

    def close(self) -> None:
        with _POOLS_LOCK:
            pool, self._pool = self._pool, None
            if pool is not None:
                pool.openers -= 1
                if pool.openers == 0:
                    del _POOLS[pool.name]

    def _open(self) -> MemoryPool:
        if self._pool is None:
            raise StoreError("SF-STORE-CLOSED", f"store {self.name!r} is closed")
        return self._pool
