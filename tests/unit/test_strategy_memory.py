"""Logits never exist for more rows than a chunk, forward and backward: memory does not grow with steps × rows × vocabulary."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from fixtures.blocks import random_features
from fixtures.every_strategy import EVERY_STRATEGY
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from specfleet.trainer.strategies.base import Strategy

VOCABULARIES = (384, 128)  # the target's, and that of EAGLE's drafts
CHUNK = 5


class WideRows(TorchDispatchMode):
    """Remembers the most rows of any tensor over a vocabulary that an operation makes."""

    def __init__(self, known: list[torch.Tensor]) -> None:
        super().__init__()
        self.most = 0
        self._known = {tensor.untyped_storage().data_ptr() for tensor in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and self._counts(tensor):
                self.most = max(self.most, tensor.numel() // tensor.shape[-1])
        return made

    def _counts(self, tensor: torch.Tensor) -> bool:
        wide = tensor.ndim > 1 and tensor.shape[-1] in VOCABULARIES
        return wide and tensor.untyped_storage().data_ptr() not in self._known


def _in_small_chunks(strategy: Any) -> Strategy:
    if hasattr(strategy, "chunk_rows"):
        strategy.chunk_rows = CHUNK
    else:
        strategy._plan = replace(strategy._plan, chunk_blocks=1)
    return strategy


@pytest.mark.parametrize("name", EVERY_STRATEGY)
def test_logits_exist_for_one_chunk_at_a_time(name: str) -> None:
    strategy = _in_small_chunks(EVERY_STRATEGY[name](torch.float32))
    prepared = strategy.prepare(strategy.collate(random_features([40, 31])))
    frozen = [value for value in vars(strategy).values() if isinstance(value, torch.Tensor)]
    known = [*strategy.draft.state_dict().values(), *frozen, *prepared.tensors.values()]
    rows = sum(float(pair[1]) for metric, pair in strategy.objective(prepared).metrics.items() if metric[:4] == "acc_")
    with WideRows(known) as seen:
        torch.stack(list(strategy.objective(prepared).numerators.values())).sum().backward()
    # A chunk of DSpark ends with the last row of a teacher, which a few blocks may share.
    assert 0 < seen.most <= 2 * CHUNK < rows / 3
