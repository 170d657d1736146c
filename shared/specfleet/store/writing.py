"""Samples on their way into a Mooncake pool: many in one transfer, each with an outcome of its own."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from specfleet.contracts.errors import StoreError, StoreFullError
from specfleet.store.arena import aligned
from specfleet.store.base import Sample
from specfleet.store.connection import NO_ROOM, Connection
from specfleet.store.tensors import Block, Bytes, checksum, plan_specs
from specfleet.store.transfer import INLINE_BYTES, SETTLED, Run, groups_of, stage, too_large
from specfleet.wire.records_pb2 import FeatureSpec

Broken = Callable[[Connection, str, int], StoreError]
"""Retires a connection whose call (what, code) failed; returns the error to raise."""


@dataclass(slots=True)
class _Object:
    spec: FeatureSpec
    data: Bytes
    address: int
    """Of the data; in transfer memory where it is lent."""
    code: int = 0


class Write:
    """One sample: its objects, and what ended it."""

    def __init__(self, store: str, sample: Sample) -> None:
        self.objects: list[_Object] = []
        self.keys: list[str] = []
        self.error: StoreError | None = None
        attempt, tensors = sample
        try:
            self.objects = [
                _Object(spec, data, tensor.data_ptr())
                for (spec, data), tensor in zip(plan_specs(store, attempt, tensors), tensors.values(), strict=True)
            ]
            self.keys = [item.spec.key for item in self.objects]
        except StoreError as error:
            self.error = error

    @property
    def outcome(self) -> list[FeatureSpec] | StoreError:
        return self.error or [item.spec for item in self.objects]


class Batch:
    """Writes of one call. An error of one is noted in it; raises StoreError only for what ends all of them."""

    def __init__(self, connection: Connection, writes: Sequence[Write], broken: Broken) -> None:
        self._connection, self._broken = connection, broken
        self._writes = [write for write in writes if write.error is None]

    def refuse(self) -> None:
        """Before anything is written: keys that are stored already or twice in the batch, and what is too large."""
        self._live()
        stored = self._exist()
        taken: set[str] = set()
        for write in self._writes:
            for key, item in zip(write.keys, write.objects, strict=True):
                if stored[key] or key in taken:
                    write.error = StoreError("SF-STORE-KEY-EXISTS", f"{key} is already stored; keys are written once")
                    break
                if aligned(item.data.nbytes) > self._connection.staging.size and not self._lent(item):
                    write.error = too_large(self._connection, item.data.nbytes)
                    break
            else:
                taken.update(write.keys)
        self._live()

    def write(self, config: Any, run: Run) -> None:
        """Transfers every object and fills in the checksums.

        What lies in lent memory goes in one piece while this thread hashes it; the rest is copied group by group, each
        while the one before is under way.
        """
        objects = [item for write in self._writes for item in write.objects]
        lent: list[_Object] = []
        copied: list[_Object] = []
        for item in objects:
            (lent if self._lent(item) else copied).append(item)
        groups = [lent] if lent else []
        for positions in groups_of([item.data.nbytes for item in copied], self._connection):
            groups.append([copied[position] for position in positions])
        inline = len(groups) == 1 and sum(item.data.nbytes for item in objects) <= INLINE_BYTES
        under_way: list[tuple[list[_Object], Callable[[], list[int]]]] = []
        try:
            for group in groups:
                transfer = self._transfer(group, config, copy=group is not lent)
                if under_way:
                    under_way[-1][1]()  # one at a time: more would only share the memory's bandwidth
                under_way.append((group, run(transfer, inline)))
                for item in group:
                    item.spec.checksum = checksum(item.data)
        finally:
            for group, result in under_way:
                for item, code in zip(group, result(), strict=True):
                    item.code = code

    def check(self) -> None:
        """After the transfer: notes what the pool had no room for, and what a put that returned 0 did not store."""
        for write in self._writes:
            for item in write.objects:
                if item.code not in (0, NO_ROOM):
                    what = f"put of {item.spec.key} ({item.spec.num_bytes} bytes)"
                    raise self._broken(self._connection, what, item.code)
            refused = [item.spec for item in write.objects if item.code == NO_ROOM]
            if refused:
                write.error = StoreFullError(
                    "SF-STORE-FULL",
                    f"the pool has no room for {refused[0].key} ({refused[0].num_bytes} bytes); "
                    f"{len(refused)} of {len(write.objects)} objects were refused",
                )
        self._live()
        stored = self._exist()
        for write in self._writes:
            if missing := [key for key in write.keys if not stored[key]]:
                write.error = StoreError(
                    "SF-STORE-SHORT-PUT", f"{missing[0]}: the put returned 0, but it is not stored"
                )

    def _live(self) -> None:
        self._writes = [write for write in self._writes if write.error is None]

    def _lent(self, item: _Object) -> bool:
        return self._connection.lent(item.address, item.data.nbytes)

    def _exist(self) -> dict[str, bool]:
        """By key. An object that some writer left half-written does not exist."""
        keys = [key for write in self._writes for key in write.keys]
        codes = self._connection.client.batch_is_exist(keys) if keys else []
        for key, code in zip(keys, codes, strict=True):
            if code not in (0, 1):
                raise self._broken(self._connection, f"existence check of {key}", code)
        return {key: code == 1 for key, code in zip(keys, codes, strict=True)}

    def _transfer(self, group: Sequence[_Object], config: Any, copy: bool) -> Callable[[], list[int]]:
        """Copies where asked; returns the transfer to run."""
        addresses = [item.address for item in group]
        block = None
        if copy:
            lengths = [aligned(item.data.nbytes) for item in group]
            block = stage(self._connection, sum(lengths))
            addresses = [block + offset for offset in accumulate(lengths[:-1], initial=0)]
            for address, item in zip(addresses, group, strict=True):
                Block(address, item.data.nbytes).bytes()[:] = item.data
        keys, sizes = [item.spec.key for item in group], [item.data.nbytes for item in group]
        connection = self._connection

        def transfer() -> list[int]:
            codes: list[int] = connection.client.batch_put_from(keys, addresses, sizes, config)
            # After any other failure a transfer may still be reading: the block retires with the connection.
            if block is not None and all(code == 0 or code in SETTLED for code in codes):
                connection.staging.release(block)
            return codes

        return transfer
