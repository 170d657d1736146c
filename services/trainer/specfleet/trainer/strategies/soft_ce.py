"""Cross entropy against a soft teacher through a linear head, in chunks of rows.

Neither logits nor probabilities of more than one chunk ever exist: the forward keeps only its inputs, and the backward
recomputes each chunk once the scale of the loss is known.
"""

from dataclasses import dataclass
from typing import Any

import torch

# 2048 rows × 32k draft vocabulary is 256 MB in fp32, the largest temporary of a training step.
CHUNK_ROWS = 2048


@dataclass(frozen=True)
class Teacher:
    """Teacher logits over the draft vocabulary, each unique row once.

    p = exp(logits − lse): with lse over the draft vocabulary p sums to one; with the full vocabulary's lse it is the true mass.
    """

    logits_UV: torch.Tensor
    lse_U: torch.Tensor


def soft_ce_head(
    x_RH: torch.Tensor,
    weight_VH: torch.Tensor,
    teacher: Teacher,
    teacher_row_R: torch.Tensor,
    live_R: torch.Tensor,
    chunk_rows: int = CHUNK_ROWS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(Σ over live rows of −Σ_v p_v log softmax(x·Wᵀ)_v, argmax of every row [R] int64).

    teacher_row_R: row of the teacher per row of x. live_R: bool; a dead row contributes exactly nothing, NaN or not.
    The sum is fp32 (fp64 for fp64 inputs), whatever dtype the head runs in.
    """
    return _SoftCeHead.apply(x_RH, weight_VH, teacher.logits_UV, teacher.lse_U, teacher_row_R, live_R, chunk_rows)


class _SoftCeHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, logits: torch.Tensor, lse: torch.Tensor,
        teacher_row: torch.Tensor, live: torch.Tensor, chunk_rows: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        ctx.save_for_backward(x, weight, logits, lse, teacher_row, live)
        ctx.chunk_rows = chunk_rows
        wide = torch.promote_types(x.dtype, torch.float32)
        loss = torch.zeros((), dtype=wide, device=x.device)
        best = torch.empty(x.shape[0], dtype=torch.int64, device=x.device)
        for rows in _chunks(x.shape[0], chunk_rows):
            z = (x[rows] @ weight.T).to(wide)
            p = _probabilities(logits, lse, teacher_row[rows], wide)
            best[rows] = z.argmax(-1)
            row_loss = p.sum(-1) * z.logsumexp(-1) - (p * z).sum(-1)
            loss += torch.where(live[rows], row_loss, 0.0).sum()
        ctx.mark_non_differentiable(best)
        return loss, best

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, logits, lse, teacher_row, live = ctx.saved_tensors
        wide = torch.promote_types(x.dtype, torch.float32)
        grad_x = torch.empty_like(x)
        grad_weight = torch.zeros(weight.shape, dtype=wide, device=weight.device)
        for rows in _chunks(x.shape[0], ctx.chunk_rows):
            z = (x[rows] @ weight.T).to(wide)
            p = _probabilities(logits, lse, teacher_row[rows], wide)
            dz = (torch.softmax(z, -1) * p.sum(-1, keepdim=True) - p) * grads[0]
            dz = torch.where(live[rows, None], dz, 0.0).to(x.dtype)
            grad_x[rows] = dz @ weight
            # Dead rows may hold NaN, and 0 · NaN is NaN.
            grad_weight += dz.T @ torch.where(live[rows, None], x[rows], 0.0)
        return grad_x, grad_weight.to(weight.dtype), None, None, None, None, None


def _probabilities(logits: torch.Tensor, lse: torch.Tensor, rows: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    return torch.exp(logits[rows].to(wide) - lse[rows, None].to(wide))


def _chunks(count: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]
