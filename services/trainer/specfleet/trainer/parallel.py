"""The ranks of one launch: JSON facts and gradient sums between them. One rank needs no process group at all."""

import json
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

# A rank may wait for a peer that waits for a prompt to be captured again, for as long as capture is away. A dead peer
# is noticed at once all the same: its connection closes.
_CONTROL_TIMEOUT = timedelta(days=7)
# Elements summed in one call: 64 MiB of fp32, large enough for bandwidth, small enough to bound gloo's scratch memory.
_BUCKET_ELEMENTS = 16 * 1024 * 1024


class Ranks:
    """This process's place among `world` data-parallel ranks. Collectives: every rank calls them in the same order."""

    def __init__(self, rank: int = 0, world: int = 1, device: torch.device | None = None) -> None:
        self.rank = rank
        self.world = world
        self.local_rank = int(os.environ.get("LOCAL_RANK", rank))
        self._sum_group: dist.ProcessGroup | None = None
        if world > 1:
            # Facts always travel over gloo, so that a control message never waits in a GPU stream.
            dist.init_process_group("gloo", rank=rank, world_size=world, timeout=_CONTROL_TIMEOUT)
            if device is not None and device.type == "cuda":
                self._sum_group = dist.new_group(backend="nccl")

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def gather(self, fact: dict[str, Any]) -> list[dict[str, Any]]:
        """Every rank's fact, in rank order, on every rank. Facts are JSON (no pickle)."""
        if self.world == 1:
            return [fact]
        own = torch.frombuffer(bytearray(json.dumps(fact).encode()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world)]
        dist.all_gather(sizes, torch.tensor([own.numel()]))
        longest = max(int(size) for size in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: own.numel()] = own
        slots = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.world)]
        dist.all_gather(slots, padded)
        return [json.loads(bytes(slot[: int(size)].numpy().tobytes())) for slot, size in zip(slots, sizes, strict=True)]

    def sum_(self, flat: torch.Tensor) -> torch.Tensor:
        """Sums a contiguous one-dimensional tensor over the ranks, in place, in buckets."""
        if self.world > 1:
            for bucket in flat.split(_BUCKET_ELEMENTS):
                dist.all_reduce(bucket, group=self._sum_group)
        return flat

    def copy_from_first_(self, tensor: torch.Tensor) -> None:
        """Gives every rank rank 0's values, in place."""
        if self.world > 1:
            dist.broadcast(tensor, src=0, group=self._sum_group)

    def close(self) -> None:
        if self.world > 1:
            dist.destroy_process_group()
