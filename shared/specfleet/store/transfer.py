"""Groups of objects on their way between tensors and registered memory."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from specfleet.contracts.errors import StoreError
from specfleet.store.arena import aligned
from specfleet.store.connection import ABSENT, INVALID, LEASE_EXPIRED, NO_ROOM, NOT_READY, Connection
from specfleet.store.tensors import Block, Bytes, tensor_view, verify
from specfleet.wire.records_pb2 import FeatureSpec

if TYPE_CHECKING:
    import torch

Run = Callable[[Callable[[], list[int]], bool], Callable[[], list[int]]]
"""Starts a transfer, in this thread (true) or another; the returned function waits for its codes."""

# Below this a hand-over between threads costs more than the overlap gains.
INLINE_BYTES = 2 << 20
# Objects move in groups: while one is transferred, the next is copied and hashed.
_GROUP_BYTES = 32 << 20
BUFFER_WAIT_S = 60.0

GONE = frozenset({NOT_READY, ABSENT})
# Answers after which no transfer is under way.
SETTLED = GONE | {NO_ROOM, INVALID, LEASE_EXPIRED}


class Read:
    """One group of objects on its way into memory: lent where some is free, else staged and copied out."""

    def __init__(self, specs: list[FeatureSpec], connection: Connection) -> None:
        self.specs = specs
        self.num_bytes = sum(spec.num_bytes for spec in specs)
        self.codes: Callable[[], list[int]] = list
        self._connection = connection
        self._lent = [connection.lend(spec.num_bytes) for spec in specs]
        self._staged: int | None = None
        self._arrays: list[Bytes] = []

    def reserve(self, wait_s: float) -> bool:
        """Finds memory for what could not be lent. False: none free and wait_s is 0; StoreError after a wait."""
        missing = sum(
            aligned(spec.num_bytes) for spec, lent in zip(self.specs, self._lent, strict=True) if lent is None
        )
        if missing:
            if wait_s == 0.0:
                self._staged = self._connection.staging.try_acquire(missing)
                if self._staged is None:
                    return False
            else:
                self._staged = stage(self._connection, missing, wait_s)
        cursor = self._staged or 0
        for spec, lent in zip(self.specs, self._lent, strict=True):
            if lent is None:
                self._arrays.append(Block(cursor, spec.num_bytes).bytes())
                cursor += aligned(spec.num_bytes)
            else:
                self._arrays.append(lent)
        return True

    def transfer(self) -> list[int]:
        codes: list[int] = self._connection.client.batch_get_into(
            [spec.key for spec in self.specs],
            [array.ctypes.data for array in self._arrays],
            [array.nbytes for array in self._arrays],
        )
        return codes

    def tensors(self) -> "dict[str, torch.Tensor]":
        """Verified tensors by name; staged ones are copied into memory of their own."""
        found = {}
        for spec, array, lent in zip(self.specs, self._arrays, self._lent, strict=True):
            verify(spec, array)
            found[spec.name] = tensor_view(spec, array.copy() if lent is None else array)
        return found

    def release(self, codes: list[int]) -> None:
        """Gives staged memory back, unless a failed transfer may still write into it: it retires with the region."""
        if self._staged is not None and all(code >= 0 or code in SETTLED for code in codes):
            self._connection.staging.release(self._staged)
            self._staged = None


def groups_of(sizes: Sequence[int], connection: Connection) -> list[list[int]]:
    """Neighbouring indices in groups that fit the transfer memory; an object above the group size is one by itself."""
    limit = min(_GROUP_BYTES, connection.staging.size)
    groups: list[list[int]] = []
    filled = limit
    for index, size in enumerate(sizes):
        if filled + aligned(size) > limit:
            groups.append([])
            filled = 0
        groups[-1].append(index)
        filled += aligned(size)
    return groups


def stage(connection: Connection, num_bytes: int, wait_s: float = BUFFER_WAIT_S) -> int:
    """Address of transfer memory for copies."""
    staging = connection.staging
    try:
        return staging.acquire(num_bytes, wait_s)
    except ValueError:
        raise too_large(connection, num_bytes) from None
    except TimeoutError as error:
        raise StoreError("SF-STORE-BUFFERS", f"transfer memory stayed busy: {error}") from None


def too_large(connection: Connection, num_bytes: int) -> StoreError:
    return StoreError(
        "SF-STORE-OBJECT-TOO-LARGE",
        f"{num_bytes} bytes in one transfer do not fit the {connection.staging.size} bytes of transfer memory for copies; "
        f"set buffer={2 * num_bytes} or more in the store URL",
    )
