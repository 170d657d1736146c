"""Stored features → the tensors every block strategy trains on. CPU only, runs in the prefetch thread.

Nothing is padded: context rows of all samples lie one after another, each cut behind its last anchor, because no slot sees
further; blocks exist only for anchors that were drawn.
Shapes: B samples, S context rows, N blocks, G slots, R supervised slots.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.utils.rnn import pad_sequence

from specfleet.trainer.strategies.anchors import sample_anchors, slot_labels
from specfleet.trainer.strategies.draws import position_draws, visit_seeds

# Read on the host while kernels are launched; anything else goes to the device.
ON_HOST = frozenset({"row_bounds", "teacher_bounds", "block_bounds", "num_tokens", "num_loss_tokens"})


@dataclass(frozen=True)
class BlockPlan:
    """How blocks are drawn and cut into chunks. seed: the run's."""

    block_size: int
    num_anchors: int
    sample_from_anchor: bool
    contiguous: bool
    chunk_blocks: int
    seed: int


def collate_blocks(samples: Sequence[dict[str, torch.Tensor]], plan: BlockPlan) -> dict[str, torch.Tensor]:
    """One micro-batch.

    context_states [S, K·H] · context_positions [S] · sample [N], anchors [N] (positions), anchor_ids [N], starts [N] (the
    context row where the sample begins) · labels [N, G] · valid [N, G] bool · rows [R]: flat slots n·G + j that are supervised ·
    row_bounds, block_bounds [C + 1]: where chunks of chunk_blocks blocks begin in rows and in blocks · num_sequences,
    num_skipped: samples with and without a block · num_tokens, num_loss_tokens. Scalars are int64.

    A sample without two supervised tokens in a row has no block: it is skipped and counted.
    """
    ids_BT = pad_sequence([sample["input_ids"].long() for sample in samples], batch_first=True)
    mask_BT = pad_sequence([sample["loss_mask"] for sample in samples], batch_first=True)
    draws = position_draws(visit_seeds(samples, plan.seed), ids_BT.shape[1])
    sample_N, anchor_N, counts_B = sample_anchors(mask_BT, draws, plan.num_anchors)
    labels, valid = slot_labels(
        ids_BT, mask_BT, sample_N, anchor_N, plan.block_size,
        sample_from_anchor=plan.sample_from_anchor, contiguous=plan.contiguous,
    )  # fmt: skip
    # The last anchor of a sample; samples without one use no context.
    last = counts_B.cumsum(0) - 1
    used_B = torch.where(counts_B > 0, torch.cat((anchor_N, anchor_N.new_zeros(1)))[last], 0)
    starts_B = used_B.cumsum(0) - used_B
    used = used_B.tolist()
    lengths = [len(sample["input_ids"]) for sample in samples]
    block_bounds = torch.arange(0, len(anchor_N) + plan.chunk_blocks, plan.chunk_blocks).clamp_max(len(anchor_N))
    before = torch.cat((torch.zeros(1, dtype=torch.int64), valid.sum(1).cumsum(0)))
    return {
        "context_states": torch.cat([sample["aux_states"][:n] for sample, n in zip(samples, used, strict=True)]),
        "context_positions": torch.cat([torch.arange(n) for n in used]),
        "sample": sample_N,
        "anchors": anchor_N,
        "anchor_ids": ids_BT[sample_N, anchor_N],
        "starts": starts_B[sample_N],
        "labels": labels,
        "valid": valid,
        "rows": valid.flatten().nonzero().flatten(),
        "row_bounds": before[block_bounds],
        "block_bounds": block_bounds,
        "num_sequences": (counts_B > 0).sum(),
        "num_skipped": (counts_B == 0).sum(),
        "num_tokens": torch.tensor(sum(lengths)),
        "num_loss_tokens": mask_BT.sum(dtype=torch.int64),
    }
