"""Cross entropy against hard labels through a frozen head, in chunks of rows.

The weight of every row is known in the forward pass, so each chunk's gradient is finished there and its logits are dropped:
one pass through the head, no recomputation, and no more than one chunk of logits at any time. The head is frozen, so only
the gradient of its input exists.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from specfleet.trainer.strategies.row_ce import row_ce

RowWeights = Callable[[torch.Tensor, slice], torch.Tensor]
"""(cross entropies [r] of a chunk's rows, which rows) → their weights [r]; nothing flows back through it."""


def hard_ce_head(
    x_RH: torch.Tensor,
    head_VH: torch.Tensor,
    labels_R: torch.Tensor,
    weights: torch.Tensor | RowWeights,
    row_bounds: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(Σ_r weight_r · −log softmax(x_r·Wᵀ)[label_r], the cross entropy of each row [R], argmax of each row [R] int64).

    Only the sum carries a gradient, and only to x. weights: [R], or a function of a chunk's own cross entropies (for weights
    that depend on the model's confidence). row_bounds: 0 = first < … < last = R; a chunk is rows between two neighbours.
    Sums and cross entropies are fp32 (fp64 for fp64 inputs), whatever dtype the head runs in.
    """
    return _HardCeHead.apply(x_RH, head_VH, labels_R, weights, tuple(row_bounds))


class _HardCeHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, head: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor | RowWeights,
        bounds: tuple[int, ...],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        wide = torch.promote_types(x.dtype, torch.float32)
        loss = torch.zeros((), dtype=wide, device=x.device)
        losses = torch.zeros(x.shape[0], dtype=wide, device=x.device)
        best = torch.zeros(x.shape[0], dtype=torch.int64, device=x.device)
        grad_x = torch.zeros_like(x) if ctx.needs_input_grad[0] else None
        for start, stop in itertools.pairwise(bounds):
            if start == stop:
                continue
            rows = slice(start, stop)
            chunk = row_ce(x[rows].to(head.dtype) @ head.T, labels[rows])
            losses[rows], best[rows] = chunk.ce_R, chunk.best_R
            weight = (weights(chunk.ce_R, rows) if callable(weights) else weights[rows]).to(wide)
            loss += (weight * chunk.ce_R).sum()
            if grad_x is not None:
                grad_x[rows] = (chunk.gradient(weight).to(head.dtype) @ head).to(x.dtype)
        ctx.save_for_backward(*(() if grad_x is None else (grad_x,)))
        ctx.mark_non_differentiable(losses, best)
        return loss, losses, best

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad_x,) = ctx.saved_tensors
        # The scale stays wide: rounded to bf16 it would be off by up to 0.4 % for every row alike.
        return (grad_x.to(grads[0].dtype) * grads[0]).to(grad_x.dtype), None, None, None, None
