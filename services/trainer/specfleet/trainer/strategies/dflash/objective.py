"""The DFlash losses: hard cross entropy of every supervised slot, weighted by decay or by D-PACE.

D-PACE weighs slot j by what predicting it better would add to the expected accepted length Σ_j Π_{u≤j} s_u, with the
smoothed confidence s = (1 − α)·q + α of the label's probability q. Its ablations keep one factor of that weight: the chance
of getting to the slot, or the value of what follows it.
"""

from collections.abc import Sequence
from typing import Literal

import torch

from specfleet.drafts.dflash import DFlashDraft
from specfleet.trainer.strategies.base import Objective, Prepared
from specfleet.trainer.strategies.block_metrics import accuracy_metrics, coverage_metrics, text_acceptance
from specfleet.trainer.strategies.hard_ce import RowWeights, hard_ce_head

TERM = "ce"

Loss = Literal["ce", "dpace", "dpace_cumulative", "dpace_continuation"]


def dpace_weights(confidence_NG: torch.Tensor, valid_NG: torch.Tensor, alpha: float, loss: Loss) -> torch.Tensor:
    """[N, G], zero where not valid. With P_j = Π_{u≤j} s_u (s = 1 on slots that are not valid) and W_j = Σ_{u≥j valid} P_u:

    dpace: W_j · dpace_cumulative: P_j · dpace_continuation: W_j / P_j.
    """
    smoothed = torch.where(valid_NG, (1 - alpha) * confidence_NG + alpha, 1.0)
    reached = smoothed.cumprod(1)
    ahead = (reached * valid_NG).flip(1).cumsum(1).flip(1)
    match loss:
        case "dpace":
            weights = ahead
        case "dpace_cumulative":
            weights = reached
        case "dpace_continuation":
            # A confidence of zero makes both zero; then nothing follows.
            weights = ahead / reached.clamp_min(torch.finfo(reached.dtype).tiny)
        case _:
            raise ValueError(f"{loss!r} is not a D-PACE loss")
    return weights * valid_NG


def dpace_rows(
    rows_R: torch.Tensor,
    row_bounds: Sequence[int],
    block_bounds: Sequence[int],
    block_size: int,
    alpha: float,
    loss: Loss,
) -> RowWeights:
    """Row weights for `hard_ce_head`. Chunks hold whole blocks, so each chunk knows all confidences its weights need."""
    # Of chunks that begin at the same row only the last has any.
    blocks_of = {start: (block_bounds[i], block_bounds[i + 1]) for i, start in enumerate(row_bounds[:-1])}

    def weigh(losses: torch.Tensor, rows: slice) -> torch.Tensor:
        first, last = blocks_of[rows.start]
        inside = rows_R[rows] - first * block_size
        confidence = losses.new_ones((last - first) * block_size)
        confidence[inside] = torch.exp(-losses)
        valid = torch.zeros_like(confidence, dtype=torch.bool)
        valid[inside] = True
        shape = (last - first, block_size)
        return dpace_weights(confidence.view(shape), valid.view(shape), alpha, loss).flatten()[inside]

    return weigh


def dflash_objective(
    draft: DFlashDraft, embedding_VH: torch.Tensor, head_VH: torch.Tensor, prepared: Prepared, loss: Loss, alpha: float
) -> Objective:
    """Forward pass and numerator of one prepared micro-batch (see `dflash.batch.collate` for its tensors)."""
    tensors, config = prepared.tensors, draft.config
    context = draft.context(tensors["context_states"], tensors["context_positions"])
    hidden = draft.blocks(context, tensors["anchors"], tensors["anchor_ids"], tensors["starts"], embedding_VH)
    rows, bounds = tensors["rows"], tensors["row_bounds"].tolist()
    weights: torch.Tensor | RowWeights = tensors["weights"]
    if loss != "ce":
        weights = dpace_rows(rows, bounds, tensors["block_bounds"].tolist(), config.block_size, alpha, loss)
    labels = tensors["labels"].flatten()[rows]
    total, losses, best = hard_ce_head(hidden.flatten(0, 1)[rows], head_VH, labels, weights, bounds)
    correct = best == labels
    count = torch.full((), float(len(rows)), device=total.device)
    blocks = (len(hidden), config.block_size, config.first_slot)
    return Objective(
        numerators={TERM: total},
        metrics={
            "ce": (losses.sum(), count),
            **accuracy_metrics(correct, rows, *blocks),
            **text_acceptance(losses, rows, *blocks),
            **coverage_metrics(tensors["num_sequences"], tensors["num_skipped"]),
        },
    )
