"""The one interface to feature storage. Backends: Mooncake, a directory, and an in-memory twin (store/factory.py)."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from specfleet.contracts.errors import StoreError
from specfleet.wire.records_pb2 import FeatureSpec, SampleRef, TaskAttempt

if TYPE_CHECKING:
    import torch


Sample = tuple[TaskAttempt, Mapping[str, "torch.Tensor"]]
"""What one put writes."""

PageLock = Callable[[int, int], Callable[[], None]]
"""Locks the pages of `num_bytes` from an address for a device's copies; returns what unlocks them. Never raises."""


@dataclass(frozen=True)
class StoreStats:
    """Bytes the pool can hold and bytes it holds now, as the backend itself reports them."""

    capacity_bytes: int
    used_bytes: int


class FeatureSource(Protocol):
    """Where a loader gets features from: a store, or a feature set (features/source.py)."""

    def get(self, ref: SampleRef, names: Sequence[str] | None = None) -> dict[str, "torch.Tensor"]: ...

    def close(self) -> None: ...


class FeatureStore(ABC):
    """Write-once objects under attempt-unique keys. Blocking calls; services run them in a thread.

    Everything in it may vanish: a missing, short or altered object raises FeatureLostError and the ledger captures it
    again. Every method may be called from several threads at once.
    """

    name: str
    """Name of the pool; the first part of every key."""

    def empty(self, shape: Sequence[int], dtype: "torch.dtype") -> "torch.Tensor":
        """An uninitialised CPU tensor that put() moves fastest: a backend may give memory it need not copy."""
        import torch

        return torch.empty(tuple(shape), dtype=dtype, device="cpu")

    def reserve(self, num_bytes: int, page_lock: PageLock) -> None:  # noqa: B027  most backends have no such memory
        """Asks, before any other call, that empty() gives memory of the backend's own, enough for num_bytes of tensors at
        a time, with its pages locked from before the first tensor until after the last. A backend without such memory
        does nothing. Raises StoreError when it cannot be had now; later connections try again.
        """

    @abstractmethod
    def put(self, attempt: TaskAttempt, tensors: Mapping[str, "torch.Tensor"]) -> list[FeatureSpec]:
        """Writes each tensor under feature_key(name, attempt, feature) and verifies that it is stored.

        Tensors are contiguous, non-empty CPU tensors of any dtype in contracts.capture.DTYPE_BYTES. Returns one spec
        per tensor, with the xxh3-64 checksum of its bytes, in the mapping's order. On any failure nothing of this
        sample stays behind. Raises StoreFullError when the pool has no room (back-pressure), StoreError otherwise.
        """

    def put_many(self, samples: Sequence[Sample]) -> list[list[FeatureSpec] | StoreError]:
        """put() of each, in their order: its specs, or the StoreError it would raise, which touches no other sample."""
        outcomes: list[list[FeatureSpec] | StoreError] = []
        for attempt, tensors in samples:
            try:
                outcomes.append(self.put(attempt, tensors))
            except StoreError as error:
                outcomes.append(error)
        return outcomes

    @abstractmethod
    def get(self, ref: SampleRef, names: Sequence[str] | None = None) -> dict[str, "torch.Tensor"]:
        """Reads features (all when names is None) as CPU tensors that stay valid after release.

        Verifies length and checksum. Raises FeatureLostError naming the key, with expected and found numbers.
        """

    @abstractmethod
    def remove(self, keys: Sequence[str]) -> list[str]:
        """Deletes objects; an absent one counts as deleted. Returns the keys that could not be deleted now.

        Raises StoreError when the store cannot be reached at all.
        """

    def release(self, ref: SampleRef) -> list[str]:
        """Deletes every object of a sample; returns what could not be deleted now."""
        return self.remove([feature.key for feature in ref.features])

    @abstractmethod
    def stats(self) -> StoreStats:
        """Capacity and fill. Raises StoreError when the backend cannot tell."""

    @abstractmethod
    def close(self) -> None:
        """Waits for calls in flight, then lets go. Tensors handed out stay valid; later calls raise StoreError."""
