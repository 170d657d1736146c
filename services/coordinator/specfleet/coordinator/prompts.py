"""Open prompt sets and epoch orders, cached: the coordinator reads prompts only to put them on the bus."""

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from specfleet.contracts.errors import DataError
from specfleet.coordinator.facts import RunFacts
from specfleet.data.prompt_set import Prompt, PromptSet
from specfleet.policies.order import epoch_order

# An order of ten million prompts is 40 MB; runs are near the border of two epochs at most.
_MAX_ORDERS = 3


class PromptSets:
    """Blocking reads run in threads, one at a time per set: a set's file handles and caches are not thread-safe."""

    def __init__(self) -> None:
        self._sets: dict[str, PromptSet] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._orders: OrderedDict[tuple[int, int, int], npt.NDArray[np.int32]] = OrderedDict()

    async def open(self, uri: str) -> PromptSet:
        """Raises DataError when the directory is not a usable prompt set."""
        async with self._locks.setdefault(uri, asyncio.Lock()):
            if uri not in self._sets:
                self._sets[uri] = await asyncio.to_thread(PromptSet.open, Path(uri.removeprefix("file://")))
            return self._sets[uri]

    async def read(self, uri: str, indices: Sequence[int]) -> list[Prompt]:
        found = await self.open(uri)
        async with self._locks[uri]:
            return await asyncio.to_thread(found.read, indices)

    async def lengths(self, uri: str) -> npt.NDArray[np.int32]:
        """Tokens of every prompt, [num_prompts] int32."""
        found = await self.open(uri)
        async with self._locks[uri]:
            return await asyncio.to_thread(lambda: found.num_tokens)

    async def tasks(self, facts: RunFacts, first_seq: int, count: int) -> list[tuple[int, int, int]]:
        """(epoch, prompt_index, num_tokens) of the tasks at positions first_seq, …; fewer at the end of the run."""
        lengths = await self.lengths(facts.prompt_set_uri)
        if len(lengths) != facts.num_prompts:
            raise DataError(
                "SF-DATA-PROMPT-SET",
                f"{facts.prompt_set_uri} holds {len(lengths)} prompts, run {facts.run_id} was submitted with {facts.num_prompts}",
            )
        found: list[tuple[int, int, int]] = []
        seq, last = first_seq, min(first_seq + count, facts.num_tasks)
        while seq < last:
            epoch, start = divmod(seq, facts.num_prompts)
            stop = min(facts.num_prompts, start + last - seq)
            indices = self._order(facts, epoch)[start:stop]
            found += [(epoch, int(index), int(lengths[index])) for index in indices]
            seq += stop - start
        return found

    def _order(self, facts: RunFacts, epoch: int) -> npt.NDArray[np.int32]:
        key = (facts.config.data.seed, epoch, facts.num_prompts)
        if key not in self._orders:
            self._orders[key] = epoch_order(*key)
            if len(self._orders) > _MAX_ORDERS:
                self._orders.popitem(last=False)
        self._orders.move_to_end(key)
        return self._orders[key]

    def close(self) -> None:
        for found in self._sets.values():
            found.close()
