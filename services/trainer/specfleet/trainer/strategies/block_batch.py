"""Stored features → the tensors every block strategy trains on. CPU only, runs in the prefetch thread.

Nothing is padded: context rows of all samples lie one after another, each cut behind its last anchor, because no slot sees
further; blocks exist only for anchors that were drawn.
Shapes: B samples, S context rows, N blocks, G slots, R supervised slots.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.utils.rnn import pad_sequence

from specfleet.trainer.strategies.anchors import sample_anchors, slot_decay, slot_labels
from specfleet.trainer.strategies.draws import position_draws, visit_seeds

# Read on the host while kernels are launched; anything else goes to the device.
ON_HOST = frozenset({"row_bounds", "teacher_bounds", "block_bounds", "num_tokens", "num_loss_tokens"})


@dataclass(frozen=True)
class BlockPlan:
    """How blocks are drawn and cut into chunks. seed: the run's. page_locked: states are written where a GPU copies from."""

    block_size: int
    num_anchors: int
    sample_from_anchor: bool
    contiguous: bool
    chunk_blocks: int
    seed: int
    page_locked: bool = False


def collate_blocks(samples: Sequence[dict[str, torch.Tensor]], plan: BlockPlan) -> dict[str, torch.Tensor]:
    """One micro-batch.

    context_states [S, K·H] · context_positions [S] · sample [N], anchors [N] (positions), anchor_ids [N], starts [N] (the
    context row where the sample begins) · labels [N, G] · valid [N, G] bool · rows [R]: flat slots n·G + j that are supervised ·
    row_bounds, block_bounds [C + 1]: where chunks of chunk_blocks blocks begin in rows and in blocks · num_sequences,
    num_skipped: samples with and without a block · num_tokens, num_loss_tokens. Scalars are int64.

    A sample without two supervised tokens in a row has no block: it is skipped and counted.
    """
    ids_BT = pad_sequence([sample["input_ids"] for sample in samples], batch_first=True).long()
    mask_BT = pad_sequence([sample["loss_mask"] for sample in samples], batch_first=True)
    draws = position_draws(visit_seeds(samples, plan.seed), ids_BT.shape[1])
    sample_N, anchor_N, counts_B = sample_anchors(mask_BT, draws, plan.num_anchors)
    labels, valid = slot_labels(
        ids_BT, mask_BT, sample_N, anchor_N, plan.block_size,
        sample_from_anchor=plan.sample_from_anchor, contiguous=plan.contiguous,
    )  # fmt: skip
    used_B = torch.zeros_like(counts_B).scatter_reduce(0, sample_N, anchor_N, "amax")
    starts_B = used_B.cumsum(0) - used_B
    context = new_states(int(used_B.sum()), samples[0]["aux_states"], plan)
    torch.cat([sample["aux_states"][:n] for sample, n in zip(samples, used_B.tolist(), strict=True)], out=context)
    rows = valid.flatten().nonzero().flatten()
    block_bounds = torch.arange(0, len(anchor_N) + plan.chunk_blocks, plan.chunk_blocks).clamp_max(len(anchor_N))
    return {
        "context_states": context,
        "context_positions": torch.arange(len(context)) - starts_B.repeat_interleave(used_B),
        "sample": sample_N,
        "anchors": anchor_N,
        "anchor_ids": ids_BT[sample_N, anchor_N],
        "starts": starts_B[sample_N],
        "labels": labels,
        "valid": valid,
        "rows": rows,
        "row_bounds": torch.searchsorted(rows, block_bounds * plan.block_size),
        "block_bounds": block_bounds,
        "num_sequences": (counts_B > 0).sum(),
        "num_skipped": (counts_B == 0).sum(),
        "num_tokens": torch.tensor(sum(len(sample["input_ids"]) for sample in samples)),
        "num_loss_tokens": mask_BT.sum(dtype=torch.int64),
    }


def new_states(count: int, like_TH: torch.Tensor, plan: BlockPlan) -> torch.Tensor:
    """[count, H] of the same dtype, not yet written. States are nearly all of a batch: copied once more, into memory that is new
    each time, they would take most of the time of collating. torch hands page-locked memory out again."""
    return torch.empty(count, like_TH.shape[1], dtype=like_TH.dtype, pin_memory=plan.page_locked)


def slot_weights(batch: dict[str, torch.Tensor], plan: BlockPlan, gamma: float | None) -> torch.Tensor:
    """[R] fp32: the decay of each supervised slot."""
    decay = slot_decay(plan.block_size, 0 if plan.sample_from_anchor else 1, gamma)
    return decay.repeat(len(batch["anchors"])).index_select(0, batch["rows"])
