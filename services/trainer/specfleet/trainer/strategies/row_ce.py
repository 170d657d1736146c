"""Cross entropy of a chunk of rows of logits, with the gradient in place of the logits.

Losses through a frozen head know every row's weight in the forward pass, so a chunk's gradient is finished there and neither
its logits nor its probabilities are kept.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch


class RowCe(NamedTuple):
    ce_R: torch.Tensor
    """fp32 (fp64 for fp64 logits)."""
    best_R: torch.Tensor
    """argmax, int64."""
    gradient: Callable[[torch.Tensor], torch.Tensor]
    """Weights [R] → d Σ_r weight_r·ce_r / d logits [R, V]. To be called once: it overwrites what it is made from."""


def row_ce(logits_RV: torch.Tensor, labels_R: torch.Tensor) -> RowCe:
    """The logits are consumed. Sums are fp32 (fp64 for fp64 logits)."""
    if logits_RV.is_cuda:
        # Imported here: only hosts with a GPU have Triton.
        from specfleet.trainer.kernels.rows import row_gradient_, row_statistics

        found = row_statistics(logits_RV, labels_R)
        return RowCe(found.ce_R, found.best_R, lambda weights: row_gradient_(logits_RV, labels_R, found.lse_R, weights))
    z = logits_RV.to(torch.promote_types(logits_RV.dtype, torch.float32))
    label = labels_R[:, None]
    own = z.gather(-1, label)[:, 0]
    peak, best = z.max(-1)
    # In place: z is by far the largest tensor of a training step.
    mass = z.sub_(peak[:, None]).exp_().sum(-1)

    def gradient(weights: torch.Tensor) -> torch.Tensor:
        return z.mul_((weights / mass)[:, None]).scatter_add_(-1, label, -weights[:, None])

    return RowCe(mass.log() + peak - own, best, gradient)
