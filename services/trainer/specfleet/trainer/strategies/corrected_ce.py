"""Cross entropy of corrected and of uncorrected logits through a frozen head, in one pass over chunks of rows.

With U = z·Wᵀ (W frozen) and F = U + c·Bᵀ (B trainable) the loss is Σ_r w_r·((1 − λ)·CE(F_r) + λ·CE(U_r)). All weights are known
in the forward pass, so each chunk's gradient is finished there: both parts meet in one product with W, and no more than two
chunks of logits exist at any time. W and B are never joined into one matrix.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from specfleet.trainer.strategies.row_ce import row_ce


class Rows(NamedTuple):
    """Per row its cross entropy (fp32, or fp64 for fp64 inputs) and its argmax (int64)."""

    ce_R: torch.Tensor
    best_R: torch.Tensor


class CorrectedCe(NamedTuple):
    """Only loss carries a gradient: to x, codes and correction. final: None at λ = 1. base: None at λ = 0."""

    loss: torch.Tensor
    final: Rows | None
    base: Rows | None


def corrected_ce_head(
    x_RH: torch.Tensor,
    head_VH: torch.Tensor,
    codes_RE: torch.Tensor | None,
    correction_VE: torch.Tensor,
    labels_R: torch.Tensor,
    weights_R: torch.Tensor,
    row_bounds: Sequence[int],
    base_weight: float,
) -> CorrectedCe:
    """base_weight: λ; at 0 the uncorrected loss is not computed, at 1 the corrected one is not (and codes may be None).

    row_bounds: 0 = first ≤ … ≤ last = R; a chunk is the rows between two neighbours.
    """
    if codes_RE is None and base_weight < 1:
        raise ValueError(f"base_weight {base_weight} asks for the corrected loss, which needs codes")
    codes = codes_RE if base_weight < 1 else None
    loss, *values = _CorrectedCe.apply(
        x_RH, head_VH, codes, correction_VE, labels_R, weights_R, tuple(row_bounds), base_weight
    )
    return CorrectedCe(loss, Rows(*values[:2]) if base_weight < 1 else None, Rows(*values[2:]) if base_weight else None)


class _CorrectedCe(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, head: torch.Tensor, codes: torch.Tensor | None, correction: torch.Tensor,
        labels: torch.Tensor, weights: torch.Tensor, bounds: tuple[int, ...], base_weight: float,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        wide = torch.promote_types(x.dtype, torch.float32)
        final, base = (_empty(x, wide) for _ in range(2))
        loss = torch.zeros((), dtype=wide, device=x.device)
        grad_x = torch.zeros_like(x)
        grad_codes = None if codes is None else torch.zeros_like(codes)
        # Every chunk adds to the same matrix, so the sum is kept wide.
        grad_correction = torch.zeros(correction.shape, dtype=wide, device=x.device)
        for start, stop in pairwise(bounds):
            if start == stop:
                continue
            rows = slice(start, stop)
            base_z = x[rows].to(head.dtype) @ head.T
            final_z = None
            if codes is not None:
                operands = codes[rows].to(head.dtype), correction.to(head.dtype).T
                # In place where nobody else needs the uncorrected logits.
                final_z = torch.addmm(base_z, *operands) if base_weight else base_z.addmm_(*operands)
            dz = None
            if final_z is not None and codes is not None and grad_codes is not None:
                part, dz = _part(final_z, labels, (1 - base_weight) * weights[rows].to(wide), final, rows)
                loss += part
                low = dz.to(correction.dtype)
                grad_codes[rows] = low @ correction
                grad_correction += low.T @ codes[rows]
            if base_weight:
                part, dz_base = _part(base_z, labels, base_weight * weights[rows].to(wide), base, rows)
                loss += part
                dz = dz_base if dz is None else dz.add_(dz_base)
            assert dz is not None
            grad_x[rows] = (dz.to(head.dtype) @ head).to(x.dtype)
        ctx.save_for_backward(grad_x, grad_codes, grad_correction.to(correction.dtype))
        ctx.mark_non_differentiable(*final, *base)
        return loss, *final, *base

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # The scale stays wide: rounded to bf16 it would be off by up to 0.4 % for every row alike.
        x, codes, correction = (
            None if grad is None else (grad.to(grads[0].dtype) * grads[0]).to(grad.dtype) for grad in ctx.saved_tensors
        )
        return x, None, codes, correction, None, None, None, None


def _part(
    z: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor, into: Rows, rows: slice
) -> tuple[torch.Tensor, torch.Tensor]:
    """Σ weight·CE of a chunk and its gradient in place of the logits z; writes the chunk's rows `into`."""
    chunk = row_ce(z, labels[rows])
    into.ce_R[rows], into.best_R[rows] = chunk.ce_R, chunk.best_R
    return (weights * chunk.ce_R).sum(), chunk.gradient(weights)


def _empty(x: torch.Tensor, wide: torch.dtype) -> Rows:
    return Rows(
        torch.zeros(x.shape[0], dtype=wide, device=x.device),
        torch.zeros(x.shape[0], dtype=torch.int64, device=x.device),
    )
