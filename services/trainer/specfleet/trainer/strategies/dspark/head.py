"""Cross entropy and distance to the teacher through corrected logits, in chunks of rows whose gradient is finished at once.

With q = softmax(x·Wᵀ + c·Bᵀ) and the teacher p = softmax(t·Wᵀ), W frozen and B trainable:

    CE = −log q[label]        L1 = Σ_v |q_v − p_v|   (twice the total variation: acceptance is 1 − L1/2)

    ∂L1/∂z = q ⊙ (σ − Σ_v q_v σ_v),  σ = sign(q − p)
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch


class TeacherRows(NamedTuple):
    """Where the teacher of each row is. Rows are in the order of their teachers (see `dspark.batch`)."""

    states_UH: torch.Tensor
    teacher_of_R: torch.Tensor
    row_bounds: Sequence[int]
    teacher_bounds: Sequence[int]


class Judged(NamedTuple):
    """loss: Σ_r w_r·(a·CE_r + b·L1_r), the only one with a gradient (to x, codes, correction). The rest is per row [R].

    best_R: argmax of q. teacher_best_R: argmax of p. top_R, teacher_top_R: their probabilities.
    """

    loss: torch.Tensor
    ce_R: torch.Tensor
    l1_R: torch.Tensor
    top_R: torch.Tensor
    teacher_top_R: torch.Tensor
    best_R: torch.Tensor
    teacher_best_R: torch.Tensor

    @property
    def acceptance_R(self) -> torch.Tensor:
        """c*: the chance that lossless sampling accepts a token drawn from q."""
        return (1 - self.l1_R / 2).clamp(0.0, 1.0)


def judged_head(
    x_RH: torch.Tensor,
    head_VH: torch.Tensor,
    codes_RE: torch.Tensor,
    correction_VE: torch.Tensor,
    labels_R: torch.Tensor,
    weights_R: torch.Tensor,
    teacher: TeacherRows,
    ce_weight: float,
    l1_weight: float,
) -> Judged:
    """The teacher's logits go through the same head. Sums are fp32 (fp64 for fp64 inputs), whatever dtype the head runs in."""
    return Judged(
        *_JudgedHead.apply(x_RH, head_VH, codes_RE, correction_VE, labels_R, weights_R, teacher, ce_weight, l1_weight)
    )


class _JudgedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, head: torch.Tensor, codes: torch.Tensor, correction: torch.Tensor,
        labels: torch.Tensor, weights: torch.Tensor, teacher: TeacherRows, ce_weight: float, l1_weight: float,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        wide = torch.promote_types(x.dtype, torch.float32)
        weights = weights.to(wide)
        ce, l1, top, teacher_top = (torch.zeros(x.shape[0], dtype=wide, device=x.device) for _ in range(4))
        best, teacher_best = (torch.zeros(x.shape[0], dtype=torch.int64, device=x.device) for _ in range(2))
        grad_x, grad_codes = torch.zeros_like(x), torch.zeros_like(codes)
        # Every chunk adds to the same matrix, so the sum is kept wide.
        grad_correction = torch.zeros(correction.shape, dtype=wide, device=x.device)
        bounds, of = teacher.row_bounds, teacher.teacher_bounds
        for start, stop, first, last in zip(bounds, bounds[1:], of, of[1:], strict=False):
            if start == stop:
                continue
            rows = slice(start, stop)
            z = torch.addmm(x[rows].to(head.dtype) @ head.T, codes[rows].to(head.dtype), correction.to(head.dtype).T)
            logits = teacher.states_UH[first:last].to(head.dtype) @ head.T
            found, dz = judge_rows(
                z, logits, teacher.teacher_of_R[rows] - first, labels[rows], weights[rows], ce_weight, l1_weight
            )
            for whole, part in zip((ce, l1, top, teacher_top, best, teacher_best), found, strict=True):
                whole[rows] = part
            low = dz.to(head.dtype)
            del z, logits, dz
            grad_x[rows] = (low @ head).to(x.dtype)
            low = low.to(correction.dtype)
            grad_codes[rows] = low @ correction
            grad_correction += low.T @ codes[rows]
        loss = (weights * (ce_weight * ce + l1_weight * l1)).sum()
        ctx.save_for_backward(grad_x, grad_codes, grad_correction.to(correction.dtype))
        ctx.mark_non_differentiable(ce, l1, top, teacher_top, best, teacher_best)
        return loss, ce, l1, top, teacher_top, best, teacher_best

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # The scale stays wide: rounded to bf16 it would be off by up to 0.4 % for every row alike.
        x, codes, correction = ((grad.to(grads[0].dtype) * grads[0]).to(grad.dtype) for grad in ctx.saved_tensors)
        return x, None, codes, correction, None, None, None, None, None


def judge_rows(
    z: torch.Tensor, teacher_logits: torch.Tensor, teacher_of: torch.Tensor, labels: torch.Tensor,
    weights: torch.Tensor, ce_weight: float, l1_weight: float,
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:  # fmt: skip
    """The six row tensors of `Judged` for one chunk, and the gradient in place of its logits z, which are consumed."""
    if z.is_cuda:
        # Imported here: only hosts with a GPU have Triton.
        from specfleet.trainer.kernels.rows import row_distance_gradient_, row_distances, row_statistics

        draft = row_statistics(z, labels)
        judge = row_statistics(teacher_logits, labels.new_zeros(len(teacher_logits)))
        l1, lean = row_distances(z, draft.lse_R, teacher_logits, judge.lse_R, teacher_of)
        dz = row_distance_gradient_(
            z, labels, draft.lse_R, teacher_logits, judge.lse_R, teacher_of, lean, weights, ce_weight, l1_weight
        )
        return (draft.ce_R, l1, draft.top_R, judge.top_R[teacher_of], draft.best_R, judge.best_R[teacher_of]), dz
    wide, label = weights.dtype, labels[:, None]
    p = teacher_logits.to(wide).softmax(-1)
    p_top, p_best = p.max(-1)
    q = z.to(wide)
    peak, best = q.max(-1)
    own = q.gather(-1, label)[:, 0]
    # From here on in place: these are by far the largest tensors of a training step.
    mass = q.sub_(peak[:, None]).exp_().sum(-1)
    q.div_(mass[:, None])
    gap = p[teacher_of].neg_().add_(q)
    del p
    l1 = gap.abs().sum(-1)
    sign = gap.sign_()
    lean = torch.linalg.vecdot(q, sign)
    dz = sign.sub_(lean[:, None]).mul_(l1_weight).add_(ce_weight).mul_(q).mul_(weights[:, None])
    dz.scatter_add_(-1, label, -ce_weight * weights[:, None])
    return (mass.log() + peak - own, l1, 1 / mass, p_top[teacher_of], best, p_best[teacher_of]), dz
