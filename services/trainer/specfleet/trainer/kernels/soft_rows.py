"""The losses against a soft teacher (strategies/soft_ce.py) as Triton kernels over logits as they are.

Written out in PyTorch they take wide copies of both sides' logits and some twenty passes over them. A program has one row, or
for gradients one stretch of a row; sums are fp32.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

# Logits of each side a program reads at once.
_STRETCH = 2048


class Statistics(NamedTuple):
    """Per row [R], fp32 but for best_R. With q = softmax of the logits, p̃ and p the teacher's (see `soft_ce.Teacher`):

    ce_R: −Σ p̃ log q · best_R: argmax, int64, the lowest of equals · alpha_R: Σ min(p, q) · lse_R: of the logits · told_R: Σ p̃ ·
    rising_R: Σ q where q < p. α and rising are zero where p is not known.
    """

    ce_R: torch.Tensor
    best_R: torch.Tensor
    alpha_R: torch.Tensor
    lse_R: torch.Tensor
    told_R: torch.Tensor
    rising_R: torch.Tensor


def soft_statistics(
    logits_RV: torch.Tensor, teacher_UV: torch.Tensor, teacher_lse_U: torch.Tensor, full_lse_U: torch.Tensor | None,
    teacher_of_R: torch.Tensor,
) -> Statistics:  # fmt: skip
    """full_lse_U: the teacher's log-sum-exp over the target's vocabulary, None when p is not known."""
    rows, vocabulary = logits_RV.shape
    ce, alpha, lse, told, rising = (torch.zeros(rows, dtype=torch.float32, device=logits_RV.device) for _ in range(5))
    best = torch.zeros(rows, dtype=torch.int64, device=logits_RV.device)
    if rows:
        known = full_lse_U is not None
        _statistics_kernel[(rows,)](
            logits_RV, teacher_UV, teacher_lse_U, full_lse_U if known else teacher_lse_U, teacher_of_R,
            ce, best, lse, told, alpha, rising, vocabulary, KNOWN=known, STRETCH=_STRETCH, num_warps=8,
        )  # fmt: skip
    return Statistics(ce, best, alpha, lse, told, rising)


def soft_gradient_(
    logits_RV: torch.Tensor, teacher_UV: torch.Tensor, teacher_lse_U: torch.Tensor, full_lse_U: torch.Tensor | None,
    teacher_of_R: torch.Tensor, lse_R: torch.Tensor, told_R: torch.Tensor, rising_R: torch.Tensor, by_ce_R: torch.Tensor,
    by_alpha_R: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """d Σ_r (by_ce_r · CE_r + by_alpha_r · α_r) / d logits, in place of the logits; exactly zero where both are."""
    rows, vocabulary = logits_RV.shape
    if rows:
        known = full_lse_U is not None
        _gradient_kernel[(rows, triton.cdiv(vocabulary, _STRETCH))](
            logits_RV, teacher_UV, teacher_lse_U, full_lse_U if known else teacher_lse_U, teacher_of_R,
            lse_R, told_R, rising_R, by_ce_R, by_alpha_R, vocabulary, KNOWN=known, STRETCH=_STRETCH,
            num_warps=8,
        )  # fmt: skip
    return logits_RV


# Rows are slices that begin anywhere; their alignment must not make Triton compile a kernel again.
@triton.jit(do_not_specialize_on_alignment=["teacher_of"])
def _statistics_kernel(
    logits, teacher, teacher_lse, full_lse, teacher_of, ce, best, lse, told, alpha, rising, vocabulary,
    KNOWN: tl.constexpr, STRETCH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    own = logits + row.to(tl.int64) * vocabulary
    judge = tl.load(teacher_of + row).to(tl.int64)
    other = teacher + judge * vocabulary
    shift = tl.load(teacher_lse + judge)
    # Every lane keeps its own running maximum and sums; they meet at the end. Finite, so that idle lanes stay defined.
    peak = tl.full([STRETCH], -1e30, tl.float32)
    mass = tl.zeros([STRETCH], tl.float32)
    place = tl.full([STRETCH], 0, tl.int32)
    chances = tl.zeros([STRETCH], tl.float32)
    product = tl.zeros([STRETCH], tl.float32)
    for start in range(0, vocabulary, STRETCH):
        column = start + tl.arange(0, STRETCH)
        inside = column < vocabulary
        z = tl.load(own + column, mask=inside, other=float("-inf")).to(tl.float32)
        p = tl.exp(tl.load(other + column, mask=inside, other=float("-inf")).to(tl.float32) - shift)
        chances += p
        product += p * tl.where(inside, z, 0.0)
        higher = tl.maximum(peak, z)
        mass = mass * tl.exp(peak - higher) + tl.exp(z - higher)
        place = tl.where(z > peak, column, place)
        peak = higher
    highest = tl.max(peak, 0)
    total = highest + tl.log(tl.sum(mass * tl.exp(peak - highest), 0))
    sum_p = tl.sum(chances, 0)
    tl.store(ce + row, sum_p * total - tl.sum(product, 0))
    tl.store(best + row, tl.min(tl.where(peak == highest, place, vocabulary), 0).to(tl.int64))
    tl.store(lse + row, total)
    tl.store(told + row, sum_p)
    if KNOWN:
        full = tl.load(full_lse + judge)
        overlap = tl.zeros([STRETCH], tl.float32)
        below = tl.zeros([STRETCH], tl.float32)
        for start in range(0, vocabulary, STRETCH):
            column = start + tl.arange(0, STRETCH)
            inside = column < vocabulary
            q = tl.exp(tl.load(own + column, mask=inside, other=float("-inf")).to(tl.float32) - total)
            p = tl.exp(tl.load(other + column, mask=inside, other=float("-inf")).to(tl.float32) - full)
            overlap += tl.minimum(p, q)
            below += tl.where(q < p, q, 0.0)
        tl.store(alpha + row, tl.sum(overlap, 0))
        tl.store(rising + row, tl.sum(below, 0))


@triton.jit(do_not_specialize_on_alignment=["teacher_of", "lse", "told", "rising", "by_ce", "by_alpha"])
def _gradient_kernel(
    logits, teacher, teacher_lse, full_lse, teacher_of, lse, told, rising, by_ce, by_alpha, vocabulary,
    KNOWN: tl.constexpr, STRETCH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    column = tl.program_id(1) * STRETCH + tl.arange(0, STRETCH)
    inside = column < vocabulary
    own = logits + row.to(tl.int64) * vocabulary + column
    judge = tl.load(teacher_of + row).to(tl.int64)
    t = tl.load(teacher + judge * vocabulary + column, mask=inside, other=float("-inf")).to(tl.float32)
    q = tl.exp(tl.load(own, mask=inside, other=float("-inf")).to(tl.float32) - tl.load(lse + row))
    weight = tl.load(by_ce + row)
    gradient = weight * (q * tl.load(told + row) - tl.exp(t - tl.load(teacher_lse + judge)))
    if KNOWN:
        slope = tl.load(by_alpha + row)
        p = tl.exp(t - tl.load(full_lse + judge))
        gradient += slope * (tl.where(q < p, q, 0.0) - q * tl.load(rising + row))
        # A row without weight may hold NaN.
        gradient = tl.where((weight == 0.0) & (slope == 0.0), 0.0, gradient)
    else:
        gradient = tl.where(weight == 0.0, 0.0, gradient)
    tl.store(own, gradient.to(logits.dtype.element_ty), mask=inside)
