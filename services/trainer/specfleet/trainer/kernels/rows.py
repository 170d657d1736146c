"""Losses of rows of logits as Triton kernels: some read the logits, the last overwrites them with their gradient.

Written out in PyTorch the same takes wide copies and ten or more passes over them, and the logits are the largest tensor of a
step. A program has one row, or for gradients one stretch of a row; sums are fp32.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

# Logits a program reads at once.
_STRETCH = 4096
# Slices that begin anywhere: Triton must not compile a kernel again because their alignment changed.
_SLICED = ("labels", "weights")


class RowStatistics(NamedTuple):
    """ce_R, lse_R (log-sum-exp), top_R (largest probability): fp32. best_R: argmax, int64, the lowest of equals."""

    ce_R: torch.Tensor
    lse_R: torch.Tensor
    top_R: torch.Tensor
    best_R: torch.Tensor


def row_statistics(logits_RV: torch.Tensor, labels_R: torch.Tensor) -> RowStatistics:
    rows, vocabulary = logits_RV.shape
    ce, lse, top = (torch.empty(rows, dtype=torch.float32, device=logits_RV.device) for _ in range(3))
    best = torch.empty(rows, dtype=torch.int64, device=logits_RV.device)
    if rows:
        _statistics_kernel[(rows,)](logits_RV, labels_R, ce, lse, top, best, vocabulary, STRETCH=_STRETCH, num_warps=8)
    return RowStatistics(ce, lse, top, best)


def row_gradient_(
    logits_RV: torch.Tensor, labels_R: torch.Tensor, lse_R: torch.Tensor, weights_R: torch.Tensor
) -> torch.Tensor:
    """d Σ_r weight_r · CE_r / d logits, in place of the logits."""
    rows, vocabulary = logits_RV.shape
    if rows:
        grid = (rows, triton.cdiv(vocabulary, _STRETCH))
        _gradient_kernel[grid](logits_RV, labels_R, lse_R, weights_R, vocabulary, STRETCH=_STRETCH, num_warps=8)
    return logits_RV


def row_distances(
    logits_RV: torch.Tensor, lse_R: torch.Tensor, teacher_UV: torch.Tensor, teacher_lse_U: torch.Tensor,
    teacher_of_R: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Per row Σ_v |q_v − p_v| and Σ_v q_v·sign(q_v − p_v), fp32; q of the logits, p of its row of the teacher's logits."""
    rows, vocabulary = logits_RV.shape
    l1, lean = torch.empty_like(lse_R), torch.empty_like(lse_R)
    if rows:
        _distance_kernel[(rows,)](
            logits_RV,
            lse_R,
            teacher_UV,
            teacher_lse_U,
            teacher_of_R,
            l1,
            lean,
            vocabulary,
            STRETCH=_STRETCH,
            num_warps=8,
        )
    return l1, lean


def row_distance_gradient_(
    logits_RV: torch.Tensor, labels_R: torch.Tensor, lse_R: torch.Tensor, teacher_UV: torch.Tensor,
    teacher_lse_U: torch.Tensor, teacher_of_R: torch.Tensor, lean_R: torch.Tensor, weights_R: torch.Tensor,
    ce_weight: float, l1_weight: float,
) -> torch.Tensor:  # fmt: skip
    """d Σ_r weight_r·(ce_weight·CE_r + l1_weight·L1_r) / d logits, in place of the logits."""
    rows, vocabulary = logits_RV.shape
    if rows:
        _distance_gradient_kernel[(rows, triton.cdiv(vocabulary, _STRETCH))](
            logits_RV, labels_R, lse_R, teacher_UV, teacher_lse_U, teacher_of_R, lean_R, weights_R, vocabulary,
            float(ce_weight), float(l1_weight), STRETCH=_STRETCH, num_warps=8,
        )  # fmt: skip
    return logits_RV


@triton.jit(do_not_specialize_on_alignment=_SLICED)
def _statistics_kernel(logits, labels, ce, lse, top, best, vocabulary, STRETCH: tl.constexpr):
    row = tl.program_id(0)
    base = logits + row.to(tl.int64) * vocabulary
    # Every lane keeps its own running maximum and sum; they meet at the end. Finite, so that idle lanes stay defined.
    peak = tl.full([STRETCH], -1e30, tl.float32)
    mass = tl.zeros([STRETCH], tl.float32)
    place = tl.full([STRETCH], 0, tl.int32)
    for start in range(0, vocabulary, STRETCH):
        column = start + tl.arange(0, STRETCH)
        z = tl.load(base + column, mask=column < vocabulary, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(peak, z)
        mass = mass * tl.exp(peak - higher) + tl.exp(z - higher)
        place = tl.where(z > peak, column, place)
        peak = higher
    highest = tl.max(peak, 0)
    total = highest + tl.log(tl.sum(mass * tl.exp(peak - highest), 0))
    own = tl.load(base + tl.load(labels + row)).to(tl.float32)
    tl.store(ce + row, total - own)
    tl.store(lse + row, total)
    tl.store(top + row, tl.exp(highest - total))
    tl.store(best + row, tl.min(tl.where(peak == highest, place, vocabulary), 0).to(tl.int64))


@triton.jit(do_not_specialize_on_alignment=_SLICED)
def _gradient_kernel(logits, labels, lse, weights, vocabulary, STRETCH: tl.constexpr):
    row = tl.program_id(0)
    column = tl.program_id(1) * STRETCH + tl.arange(0, STRETCH)
    chance = _chances(logits, row, column, lse, vocabulary)
    gradient = tl.load(weights + row) * tl.where(column == tl.load(labels + row), chance - 1.0, chance)
    place = logits + row.to(tl.int64) * vocabulary + column
    tl.store(place, gradient.to(logits.dtype.element_ty), mask=column < vocabulary)


@triton.jit
def _chances(logits, row, column, lse, vocabulary):
    """Probabilities of a stretch of a row, zero past its end."""
    place = logits + row.to(tl.int64) * vocabulary + column
    z = tl.load(place, mask=column < vocabulary, other=float("-inf")).to(tl.float32)
    return tl.exp(z - tl.load(lse + row))


@triton.jit
def _distance_kernel(
    logits, lse, teacher, teacher_lse, teacher_of, l1, lean, vocabulary, STRETCH: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    judge = tl.load(teacher_of + row)
    distance = tl.zeros([STRETCH], tl.float32)
    balance = tl.zeros([STRETCH], tl.float32)
    for start in range(0, vocabulary, STRETCH):
        column = start + tl.arange(0, STRETCH)
        q = _chances(logits, row, column, lse, vocabulary)
        gap = q - _chances(teacher, judge, column, teacher_lse, vocabulary)
        distance += tl.abs(gap)
        balance += tl.where(gap > 0, q, tl.where(gap < 0, -q, 0.0))
    tl.store(l1 + row, tl.sum(distance, 0))
    tl.store(lean + row, tl.sum(balance, 0))


@triton.jit(do_not_specialize_on_alignment=_SLICED)
def _distance_gradient_kernel(
    logits, labels, lse, teacher, teacher_lse, teacher_of, lean, weights, vocabulary, ce_weight, l1_weight,
    STRETCH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    column = tl.program_id(1) * STRETCH + tl.arange(0, STRETCH)
    q = _chances(logits, row, column, lse, vocabulary)
    gap = q - _chances(teacher, tl.load(teacher_of + row), column, teacher_lse, vocabulary)
    sign = tl.where(gap > 0, 1.0, tl.where(gap < 0, -1.0, 0.0))
    gradient = q * (l1_weight * (sign - tl.load(lean + row)) + ce_weight)
    gradient = tl.load(weights + row) * tl.where(column == tl.load(labels + row), gradient - ce_weight, gradient)
    place = logits + row.to(tl.int64) * vocabulary + column
    tl.store(place, gradient.to(logits.dtype.element_ty), mask=column < vocabulary)
