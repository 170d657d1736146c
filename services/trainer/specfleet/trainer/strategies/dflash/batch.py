"""Stored features → one micro-batch of blocks, with the weights and denominators the loss needs. CPU only."""

from collections.abc import Sequence

import torch

from specfleet.config.strategies import DFlashSection
from specfleet.trainer.strategies.block_batch import BlockPlan, collate_blocks, slot_weights


def collate(
    samples: Sequence[dict[str, torch.Tensor]], plan: BlockPlan, section: DFlashSection
) -> dict[str, torch.Tensor]:
    """As `collate_blocks`, and: weights [R] fp32 (ce: the decay of each supervised slot; D-PACE: 1, its weights depend on the
    model) · denominator: fp32 scalar, Σ weights, or the sequences with a block for D-PACE per sequence."""
    batch = collate_blocks(samples, plan)
    batch["weights"] = slot_weights(batch, plan, section.loss_decay if section.loss == "ce" else None)
    per_sequence = section.loss != "ce" and section.dpace_norm == "sequence"
    batch["denominator"] = batch["num_sequences"].float() if per_sequence else batch["weights"].double().sum().float()
    return batch
