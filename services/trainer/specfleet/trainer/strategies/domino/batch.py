"""Stored features → one micro-batch of blocks with the weight of each supervised slot. CPU only."""

from collections.abc import Sequence

import torch

from specfleet.trainer.strategies.block_batch import BlockPlan, collate_blocks, slot_weights


def collate(
    samples: Sequence[dict[str, torch.Tensor]], plan: BlockPlan, gamma: float | None
) -> dict[str, torch.Tensor]:
    """As `collate_blocks`, and: weights [R] fp32 · denominator: fp32 scalar, their sum."""
    batch = collate_blocks(samples, plan)
    batch["weights"] = slot_weights(batch, plan, gamma)
    batch["denominator"] = batch["weights"].sum()
    return batch
