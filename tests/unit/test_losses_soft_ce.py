"""The chunked soft cross entropy: numbers worked out by hand, gradients, and what chunking must not change."""

import math

import pytest
import torch

from specfleet.trainer.strategies.soft_ce import Teacher, soft_ce_head
from specfleet.trainer.strategies.teacher import FrozenTeacher


def _row(z: list[float], p: list[float], live: bool = True) -> tuple[float, torch.Tensor]:
    """Loss and gradient of one row of logits z against probabilities p (identity head)."""
    x = torch.tensor([z], requires_grad=True)
    teacher = Teacher(torch.tensor([p]).log(), torch.zeros(1))
    loss, _, _ = soft_ce_head(x, torch.eye(len(z)), teacher, torch.tensor([0]), torch.tensor([live]))
    loss.backward()
    assert x.grad is not None
    return loss.item(), x.grad[0]


@pytest.mark.parametrize(
    ("p", "loss", "grad"),
    [
        ([0.5, 0.25, 0.25], 1.503795, [-0.375, 0.0, 0.375]),
        # probabilities that do not sum to one: the gradient is softmax·Σp − p
        ([0.3, 0.2, 0.1], 0.948092, [-0.225, -0.05, 0.275]),
    ],
)
def test_known_rows(p: list[float], loss: float, grad: list[float]) -> None:
    z = [math.log(1), math.log(2), math.log(5)]
    got_loss, got_grad = _row(z, p)
    assert got_loss == pytest.approx(loss, abs=1e-6)
    torch.testing.assert_close(got_grad, torch.tensor(grad), atol=1e-6, rtol=0)


def test_what_the_sum_is_of() -> None:
    """Cross entropy is KL plus the teacher's entropy, and a sum over live rows: whoever divides by all four rows gets less."""
    z, p = [math.log(1), math.log(2), math.log(5)], torch.tensor([0.5, 0.25, 0.25])
    torch.testing.assert_close(torch.tensor(z).softmax(-1), torch.tensor([0.125, 0.25, 0.625]))
    entropy = -float((p * p.log()).sum())
    assert _row(z, p.tolist())[0] - entropy == pytest.approx(0.464074, abs=1e-6)
    teacher, live = Teacher(p.log()[None], torch.zeros(1)), torch.tensor([False, True, False, False])
    total = soft_ce_head(torch.tensor([z] * 4), torch.eye(3), teacher, torch.zeros(4, dtype=torch.int64), live).loss
    assert float(total) / 4 == pytest.approx(0.375949, abs=1e-6)


def test_a_dead_row_contributes_nothing_even_with_nan() -> None:
    alone, nothing = _row([math.nan, 1.0], [math.nan, 0.5], live=False)
    assert alone == 0.0
    assert torch.equal(nothing, torch.zeros(2))
    x = torch.tensor([[math.nan, 1.0], [0.5, 0.1]], requires_grad=True)
    weight = torch.eye(2, requires_grad=True)
    teacher = Teacher(torch.tensor([[math.nan, 0.0], [0.5, 0.5]]), torch.zeros(2))
    loss, _, _ = soft_ce_head(x, weight, teacher, torch.tensor([0, 1]), torch.tensor([False, True]))
    loss.backward()
    assert x.grad is not None
    assert weight.grad is not None
    assert torch.equal(x.grad[0], torch.zeros(2))
    assert x.grad[1].abs().sum() > 0
    assert weight.grad.isfinite().all()
    assert loss.isfinite()


def _random(
    dtype: torch.dtype, rows: int = 7
) -> tuple[torch.Tensor, torch.Tensor, Teacher, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(rows, 5, generator=generator, dtype=torch.float64)
    weight = torch.randn(6, 5, generator=generator, dtype=torch.float64)
    logits = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    # A log-sum-exp above the reduced one: part of the mass lies outside the draft vocabulary.
    teacher = Teacher(logits.to(dtype), (logits.logsumexp(-1) + 0.3).to(dtype))
    judge = torch.tensor([0, 1, 1, 2, 3, 3, 0])[:rows]
    live = torch.tensor([True, True, False, True, True, True, True])[:rows]
    return x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), teacher, judge, live


def test_gradients_are_exact_in_fp64() -> None:
    x, weight, teacher, judge, live = _random(torch.float64)
    assert torch.autograd.gradcheck(lambda x, w: soft_ce_head(x, w, teacher, judge, live, 3)[0], (x, weight))


def test_equals_the_plain_formula() -> None:
    x, weight, teacher, judge, live = _random(torch.float32)
    loss, best, _ = soft_ce_head(x, weight, teacher, judge, live)
    z = x @ weight.T
    p = torch.exp(teacher.logits_UV[judge] - teacher.lse_U[judge, None])
    plain = -(p * z.log_softmax(-1)).sum(-1)[live].sum()
    torch.testing.assert_close(loss, plain, rtol=1e-5, atol=0)
    assert torch.equal(best, z.argmax(-1))
    fused = torch.autograd.grad(loss, (x, weight))
    for got, expected in zip(fused, torch.autograd.grad(plain, (x, weight)), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("chunk_rows", [1, 2, 3, 7, 100])
def test_chunk_size_changes_nothing(chunk_rows: int) -> None:
    x, weight, teacher, judge, live = _random(torch.float64)
    whole = torch.autograd.grad(soft_ce_head(x, weight, teacher, judge, live)[0], (x, weight))
    parts = torch.autograd.grad(soft_ce_head(x, weight, teacher, judge, live, chunk_rows)[0], (x, weight))
    for got, expected in zip(parts, whole, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-13)


def test_no_rows_give_zero_and_zero_gradients() -> None:
    x = torch.zeros(0, 5, requires_grad=True)
    weight = torch.randn(6, 5, requires_grad=True)
    empty = torch.zeros(0, dtype=torch.int64)
    loss, best, _ = soft_ce_head(x, weight, Teacher(torch.zeros(0, 6), torch.zeros(0)), empty, empty.bool())
    loss.backward()
    assert loss.item() == 0.0
    assert best.shape == (0,)
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.zeros(6, 5))


def test_bf16_head_stays_close_to_fp32() -> None:
    x, weight, teacher, judge, live = _random(torch.float32)
    exact = torch.autograd.grad(soft_ce_head(x, weight, teacher, judge, live)[0], (x, weight))
    low_x, low_weight = (t.detach().bfloat16().requires_grad_() for t in (x, weight))
    low = torch.autograd.grad(soft_ce_head(low_x, low_weight, teacher, judge, live)[0], (low_x, low_weight))
    for got, expected in zip(low, exact, strict=True):
        torch.testing.assert_close(got.float(), expected, rtol=0.0, atol=2e-2 * float(expected.abs().max()))


def test_reduced_teacher_renormalises_on_the_draft_vocabulary() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    teacher = FrozenTeacher(torch.eye(4), torch.tensor([0, 1]), full=True)
    logits, lse = teacher.draft_logits(probabilities.log()[None])
    torch.testing.assert_close(torch.exp(logits - lse[:, None])[0], torch.tensor([0.625, 0.375]))
    assert teacher.judge(probabilities.log()[None], {}, mass=False).argmax_U.tolist() == [0]
    # outside the draft vocabulary
    assert teacher.judge(torch.tensor([[0.0, 0.0, 9.0, 0.0]]), {}, mass=False).argmax_U.tolist() == [2]
