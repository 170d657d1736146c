"""Losses against a soft teacher through a linear head, in chunks of rows: cross entropy and the two LK losses.

Neither logits nor probabilities of more than one chunk ever exist: the forward keeps its inputs and two numbers per row, and
the backward recomputes each chunk once the scale of the loss is known.

With p̃ the teacher renormalised on the draft vocabulary, p its true mass there (Σp ≤ 1) and q = softmax(x·Wᵀ):

    CE = −Σ_v p̃_v log q_v        α = Σ_v min(p_v, q_v), the chance that lossless sampling accepts a token drawn from q
"""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

# On a CPU. 2048 rows × 32k draft vocabulary is 256 MB in fp32, the largest temporary of a training step.
CHUNK_ROWS = 2048
# On a GPU a chunk of logits, counted in fp32, may fill this share of its memory: few chunks, hence few launches.
_CHUNK_SHARE = 1 / 64

# Below this acceptance −log α goes on as its tangent: bounded in value and slope, and never without a slope.
_LEAST_ALPHA = 1e-5


@dataclass(frozen=True)
class Teacher:
    """Teacher logits over the draft vocabulary, each unique row once.

    p̃ = exp(logits − lse), p = exp(logits − full_lse). full_lse is over the target's whole vocabulary; without it (None)
    there is no true mass, so no acceptance and no LK loss.
    """

    logits_UV: torch.Tensor
    lse_U: torch.Tensor
    full_lse_U: torch.Tensor | None = None


@dataclass(frozen=True)
class Lk:
    """What a row's loss is made of.

    none: CE. alpha: −log α. lambda: λ·CE + (1 − λ)(1 − α) with λ = scale·exp(−decay·α) and no gradient through λ;
    per_token: whether that α is the row's own or the mean over the live rows of the call.
    """

    kind: Literal["none", "alpha", "lambda"] = "none"
    scale: float = 1.0
    decay: float = 3.0
    per_token: bool = True

    def loss(
        self, ce_R: torch.Tensor, alpha_R: torch.Tensor, live_R: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Row losses [R] and their derivatives by CE and by α [R] each. Rows that are not live may hold anything."""
        match self.kind:
            case "none":
                return ce_R, torch.ones_like(ce_R), torch.zeros_like(ce_R)
            case "alpha":
                bounded = alpha_R.clamp_min(_LEAST_ALPHA)
                return (bounded - alpha_R) / _LEAST_ALPHA - bounded.log(), torch.zeros_like(ce_R), -1.0 / bounded
            case "lambda":
                weight = self.scale * torch.exp(-self.decay * (alpha_R if self.per_token else _mean(alpha_R, live_R)))
                return weight * ce_R + (1 - weight) * (1 - alpha_R), weight.expand_as(ce_R), weight.expand_as(ce_R) - 1


def chunk_rows(vocabulary: int, device: torch.device, on_cpu: int = CHUNK_ROWS) -> int:
    """Rows of logits computed at once."""
    if device.type != "cuda":
        return on_cpu
    memory = torch.cuda.get_device_properties(device).total_memory
    return max(on_cpu, int(memory * _CHUNK_SHARE) // (4 * vocabulary))


class HeadResult(NamedTuple):
    """loss: Σ over live rows (fp32, or fp64 for fp64 inputs). best_R: argmax of every row. alpha_R: None when unknown."""

    loss: torch.Tensor
    best_R: torch.Tensor
    alpha_R: torch.Tensor | None


def soft_ce_head(
    x_RH: torch.Tensor,
    weight_VH: torch.Tensor,
    teacher: Teacher,
    teacher_row_R: torch.Tensor,
    live_R: torch.Tensor,
    chunk_rows: int = CHUNK_ROWS,
    lk: Lk | None = None,
) -> HeadResult:
    """Loss of the head x·Wᵀ. A frozen weight (no requires_grad) costs no weight gradient.

    teacher_row_R: row of the teacher per row of x. live_R: bool; a dead row contributes exactly nothing, NaN or not, but its
    argmax and α are still told.
    """
    lk = lk or Lk()
    if lk.kind != "none" and teacher.full_lse_U is None:
        raise ValueError("an LK loss needs the teacher's log-sum-exp over the target's whole vocabulary")
    return HeadResult(*_SoftCeHead.apply(x_RH, weight_VH, teacher, teacher_row_R, live_R, chunk_rows, lk))


class _SoftCeHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, teacher: Teacher, teacher_row: torch.Tensor,
        live: torch.Tensor, chunk_rows: int, lk: Lk,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:  # fmt: skip
        parts = [_read(x[rows] @ weight.T, teacher, teacher_row[rows]) for rows in _chunks(x.shape[0], chunk_rows)]
        ce, best, alpha, *kept = (torch.cat(column) for column in zip(*parts, strict=True))
        row_loss, by_ce, by_alpha = lk.loss(ce, alpha, live)
        ctx.save_for_backward(
            x, weight, teacher.logits_UV, teacher.lse_U, teacher.full_lse_U, teacher_row, live, by_ce, by_alpha, *kept
        )
        ctx.chunk_rows, ctx.kind = chunk_rows, lk.kind
        known = alpha if teacher.full_lse_U is not None else None
        ctx.mark_non_differentiable(best, *([] if known is None else [known]))
        return torch.where(live, row_loss, 0.0).sum(), best, known

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, logits, lse, full_lse, teacher_row, *by_row = ctx.saved_tensors
        teacher, live = Teacher(logits, lse, full_lse), by_row[0]
        wide = torch.promote_types(x.dtype, torch.float32)
        grad_x = torch.empty_like(x)
        grad_weight = torch.zeros(weight.shape, dtype=wide, device=weight.device) if ctx.needs_input_grad[1] else None
        for rows in _chunks(x.shape[0], ctx.chunk_rows):
            z = x[rows] @ weight.T
            dz = _slope(z, teacher, teacher_row[rows], ctx.kind, grads[0], *(value[rows] for value in by_row))
            grad_x[rows] = dz @ weight
            if grad_weight is not None:
                # Dead rows may hold NaN, and 0 · NaN is NaN.
                grad_weight += dz.T @ torch.where(live[rows, None], x[rows], 0.0)
        return grad_x, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None, None, None


def _read(logits_RV: torch.Tensor, teacher: Teacher, judge_R: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """CE, argmax and α of a chunk's rows [R] (α 0 when not known), and whatever `_slope` wants back. Consumes the logits."""
    if _fused(logits_RV):
        # Imported here: only hosts with a GPU have Triton.
        from specfleet.trainer.kernels.soft_rows import soft_statistics

        return soft_statistics(logits_RV, teacher.logits_UV, teacher.lse_U, teacher.full_lse_U, judge_R)
    wide = torch.promote_types(logits_RV.dtype, torch.float32)
    z = logits_RV.to(wide)
    best, z_lse = z.argmax(-1), z.logsumexp(-1, keepdim=True)
    logits = teacher.logits_UV[judge_R].to(wide)
    p = torch.exp(logits - _rows(teacher.lse_U, judge_R, wide))
    ce = p.sum(-1) * z_lse[:, 0] - (p * z).sum(-1)
    if teacher.full_lse_U is None:
        return ce, best, torch.zeros_like(ce)
    mass = torch.exp(logits - _rows(teacher.full_lse_U, judge_R, wide))
    return ce, best, torch.minimum(mass, torch.exp(z - z_lse)).sum(-1)


def _slope(
    logits_RV: torch.Tensor, teacher: Teacher, judge_R: torch.Tensor, kind: str, scale: torch.Tensor,
    live_R: torch.Tensor, by_ce_R: torch.Tensor, by_alpha_R: torch.Tensor, *kept: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Derivative of scale · Σ_live loss by the logits of a chunk, in their dtype. Consumes the logits."""
    if _fused(logits_RV):
        from specfleet.trainer.kernels.soft_rows import soft_gradient_

        by_ce_R, by_alpha_R = (torch.where(live_R, by * scale, 0.0) for by in (by_ce_R, by_alpha_R))
        lse_R, told_R, rising_R = kept
        return soft_gradient_(
            logits_RV, teacher.logits_UV, teacher.lse_U, teacher.full_lse_U, judge_R, lse_R, told_R, rising_R,
            by_ce_R, by_alpha_R,
        )  # fmt: skip
    wide = torch.promote_types(logits_RV.dtype, torch.float32)
    q = torch.softmax(logits_RV.to(wide), -1)
    teacher_logits = teacher.logits_UV[judge_R].to(wide)
    dz = torch.zeros((), dtype=wide, device=q.device)
    if kind != "alpha":
        p = torch.exp(teacher_logits - _rows(teacher.lse_U, judge_R, wide))
        dz = by_ce_R[:, None] * (q * p.sum(-1, keepdim=True) - p)
    if kind != "none":
        assert teacher.full_lse_U is not None
        mass = torch.exp(teacher_logits - _rows(teacher.full_lse_U, judge_R, wide))
        rising = torch.where(q < mass, q, 0.0)  # where more q means more overlap
        dz = dz + by_alpha_R[:, None] * (rising - q * rising.sum(-1, keepdim=True))
    return torch.where(live_R[:, None], dz * scale, 0.0).to(logits_RV.dtype)


def _fused(logits_RV: torch.Tensor) -> bool:
    """Kernels sum in fp32."""
    return logits_RV.is_cuda and logits_RV.dtype != torch.float64


def _rows(lse_U: torch.Tensor, rows: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    return lse_U[rows, None].to(wide)


def _mean(alpha_R: torch.Tensor, live_R: torch.Tensor) -> torch.Tensor:
    return torch.where(live_R, alpha_R, 0.0).sum() / live_R.sum().clamp_min(1)


def _chunks(count: int, size: int) -> list[slice]:
    """At least one, so that no rows are an ordinary case."""
    return [slice(start, min(start + size, count)) for start in range(0, max(count, 1), size)]
