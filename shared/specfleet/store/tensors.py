"""Between tensors and stored bytes: views, specs, checksums and the checks every backend shares.

torch is imported by the functions that touch tensors, so that `specctl` may import the store's modules without it.
"""

import functools
import math
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import xxhash
from numpy.typing import NDArray

from specfleet.contracts.capture import DTYPE_BYTES
from specfleet.contracts.errors import ContractError, FeatureLostError, StoreError
from specfleet.contracts.ids import feature_key
from specfleet.wire.records_pb2 import FeatureSpec, SampleRef, TaskAttempt

if TYPE_CHECKING:
    import torch

Bytes = NDArray[np.uint8]


class Block:
    """Memory as numpy's array interface describes it: arrays on it keep it alive, and it keeps its owner alive.

    A ctypes array would do the same, but its type is made anew for each length, which takes longer than the rest of a put.
    """

    def __init__(self, address: int, num_bytes: int, owner: object = None) -> None:
        self.__array_interface__ = {"data": (address, False), "shape": (num_bytes,), "typestr": "|u1", "version": 3}
        self._owner = owner

    def bytes(self) -> Bytes:
        return np.asarray(self)


@functools.cache
def dtype_name(dtype: "torch.dtype") -> str:
    """`bfloat16` for torch.bfloat16: the form used in specs and contracts."""
    return str(dtype).removeprefix("torch.")


def byte_view(name: str, tensor: "torch.Tensor") -> Bytes:
    """The tensor's own memory as a flat uint8 array (no copy).

    Raises StoreError for what no backend can hold: another device, a strided view, an unknown dtype, zero elements.
    """
    dtype = dtype_name(tensor.dtype)
    if dtype not in DTYPE_BYTES:
        raise StoreError(
            "SF-STORE-DTYPE", f"feature {name!r} has dtype {dtype}; the store holds {', '.join(sorted(DTYPE_BYTES))}"
        )
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.numel() == 0:
        raise StoreError(
            "SF-STORE-LAYOUT",
            f"feature {name!r} must be a contiguous CPU tensor with at least one element; got shape "
            f"{list(tensor.shape)}, strides {list(tensor.stride())}, device {tensor.device}",
        )
    # Not by torch's views: each of its calls lets other threads have Python's lock, and then waits for it.
    return Block(tensor.data_ptr(), tensor.nbytes, owner=tensor).bytes()


class _Spent(threading.local):
    seconds = 0.0


_hashing = _Spent()


def checksum(data: Bytes) -> int:
    """xxh3-64. Releases the GIL, so threads hash in parallel."""
    started = time.perf_counter()
    digest: int = xxhash.xxh3_64_intdigest(data.data)
    _hashing.seconds += time.perf_counter() - started
    return digest


def hash_seconds() -> float:
    """Seconds this thread has spent in `checksum` so far: put() and get() hash in the thread that calls them."""
    return _hashing.seconds


def hashed_elsewhere(seconds: float) -> None:
    """Of a call of this thread, in another process."""
    _hashing.seconds += seconds


def plan_specs(
    store: str, attempt: TaskAttempt, tensors: "Mapping[str, torch.Tensor]"
) -> list[tuple[FeatureSpec, Bytes]]:
    """One (spec without checksum, bytes) per tensor, in the mapping's order."""
    plan = []
    prefix = feature_key(store, attempt, "")
    for name, tensor in tensors.items():
        data = byte_view(name, tensor)
        spec = FeatureSpec(
            name=name,
            key=prefix + name,
            shape=list(tensor.shape),
            dtype=dtype_name(tensor.dtype),
            num_bytes=data.nbytes,
        )
        plan.append((spec, data))
    return plan


def select_specs(store: str, ref: SampleRef, names: Sequence[str] | None) -> list[FeatureSpec]:
    """The specs to read, in the order asked for; raises when the reference is of another pool or lacks a feature."""
    if ref.store != store:
        raise StoreError(
            "SF-STORE-WRONG-POOL",
            f"the reference points into pool {ref.store!r}, this store is {store!r}: check --store",
        )
    by_name = {spec.name: spec for spec in ref.features}
    wanted = list(by_name) if names is None else list(names)
    missing = [name for name in wanted if name not in by_name]
    if missing:
        raise ContractError(
            "SF-STORE-NO-FEATURE",
            f"the sample has features {sorted(by_name)}, not {missing}: the capture contract and the strategy disagree",
        )
    specs = [by_name[name] for name in wanted]
    for spec in specs:
        _check_spec(spec)
    return specs


def _check_spec(spec: FeatureSpec) -> None:
    expected = DTYPE_BYTES.get(spec.dtype, 0) * math.prod(spec.shape)
    if expected != spec.num_bytes or expected == 0:
        raise FeatureLostError(
            "SF-STORE-BAD-SPEC",
            f"{spec.key}: {spec.dtype}{list(spec.shape)} is not {spec.num_bytes} bytes; the reference is damaged",
        )


def check_keys(store: str, keys: Sequence[str]) -> None:
    """Refuses to delete in a pool other than this one."""
    for key in keys:
        if not key.startswith(f"{store}/"):
            raise StoreError("SF-STORE-WRONG-POOL", f"key {key!r} is not in pool {store!r}: check --store")


def lost(spec: FeatureSpec, found: str) -> FeatureLostError:
    """The error for an object that is absent or unreadable; `found` says what was there instead."""
    return FeatureLostError(
        "SF-STORE-LOST", f"{spec.key}: expected {spec.num_bytes} bytes, {found}; the prompt must be captured again"
    )


def verify(spec: FeatureSpec, data: Bytes) -> None:
    """Raises FeatureLostError when length or checksum differ from the spec."""
    if data.nbytes != spec.num_bytes:
        raise lost(spec, f"found {data.nbytes}")
    found = checksum(data)
    if found != spec.checksum:
        raise FeatureLostError(
            "SF-STORE-ALTERED",
            f"{spec.key}: checksum {found:016x} instead of {spec.checksum:016x} over {spec.num_bytes} bytes; "
            "the prompt must be captured again",
        )


def tensor_view(spec: FeatureSpec, data: Bytes) -> "torch.Tensor":
    """The bytes as a tensor of the spec's dtype and shape; shares memory with `data` and keeps it alive."""
    import torch

    return torch.from_numpy(data).view(getattr(torch, spec.dtype)).reshape(tuple(spec.shape))
