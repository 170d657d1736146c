"""Cross entropy of rows of logits as two Triton kernels: one reads the logits, the other overwrites them with their gradient.

Written out in PyTorch the same takes a wide copy and ten passes over it, and the logits are the largest tensor of a step.
A program has one row, resp. one stretch of a row; sums are fp32.
"""

import torch
import triton
import triton.language as tl

# Logits a program reads at once.
_STRETCH = 4096


def row_statistics(logits_RV: torch.Tensor, labels_R: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Per row: cross entropy with its label (fp32), log-sum-exp (fp32), argmax (int64; the lowest of equals)."""
    rows, vocabulary = logits_RV.shape
    ce, lse = (torch.empty(rows, dtype=torch.float32, device=logits_RV.device) for _ in range(2))
    best = torch.empty(rows, dtype=torch.int64, device=logits_RV.device)
    if rows:
        _statistics_kernel[(rows,)](logits_RV, labels_R, ce, lse, best, vocabulary, STRETCH=_STRETCH, num_warps=8)
    return ce, lse, best


def row_gradient_(
    logits_RV: torch.Tensor, labels_R: torch.Tensor, lse_R: torch.Tensor, weights_R: torch.Tensor
) -> torch.Tensor:
    """d Σ_r weight_r · CE_r / d logits, in place of the logits."""
    rows, vocabulary = logits_RV.shape
    if rows:
        grid = (rows, triton.cdiv(vocabulary, _STRETCH))
        _gradient_kernel[grid](logits_RV, labels_R, lse_R, weights_R, vocabulary, STRETCH=_STRETCH, num_warps=8)
    return logits_RV


@triton.jit
def _statistics_kernel(logits, labels, ce, lse, best, vocabulary, STRETCH: tl.constexpr):
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
    top = tl.max(peak, 0)
    total = top + tl.log(tl.sum(mass * tl.exp(peak - top), 0))
    own = tl.load(base + tl.load(labels + row)).to(tl.float32)
    tl.store(ce + row, total - own)
    tl.store(lse + row, total)
    tl.store(best + row, tl.min(tl.where(peak == top, place, vocabulary), 0).to(tl.int64))


@triton.jit
def _gradient_kernel(logits, labels, lse, weights, vocabulary, STRETCH: tl.constexpr):
    row = tl.program_id(0)
    column = tl.program_id(1) * STRETCH + tl.arange(0, STRETCH)
    place = logits + row.to(tl.int64) * vocabulary + column
    z = tl.load(place, mask=column < vocabulary, other=0.0).to(tl.float32)
    chance = tl.exp(z - tl.load(lse + row))
    gradient = tl.load(weights + row) * tl.where(column == tl.load(labels + row), chance - 1.0, chance)
    tl.store(place, gradient.to(logits.dtype.element_ty), mask=column < vocabulary)
