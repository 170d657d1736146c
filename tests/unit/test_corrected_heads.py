"""The fused losses of Domino and DSpark: numbers worked out by hand, equality with plain formulas, exact gradients."""

import math

import pytest
import torch
from torch.nn import functional

from specfleet.trainer.strategies.block_metrics import chain_products
from specfleet.trainer.strategies.corrected_ce import corrected_ce_head
from specfleet.trainer.strategies.dspark.batch import chunk_bounds
from specfleet.trainer.strategies.dspark.head import Judged, TeacherRows, judged_head
from specfleet.trainer.strategies.dspark.objective import confidence_loss, teacher_metrics

ROWS, HIDDEN, CODE, VOCAB = 7, 5, 3, 9
LABELS = torch.tensor([0, 8, 3, 3, 1, 7, 2])


def _inputs(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """x, head, codes, correction, weights, teacher states."""
    generator = torch.Generator().manual_seed(5)
    shapes = ((ROWS, HIDDEN), (VOCAB, HIDDEN), (ROWS, CODE), (VOCAB, CODE), (ROWS,), (4, HIDDEN))
    x, head, codes, correction, weights, states = (
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes
    )
    return x.requires_grad_(), head, codes.requires_grad_(), correction.requires_grad_(), weights.abs(), states


def _teacher(states: torch.Tensor, chunk_rows: int = 3) -> TeacherRows:
    shared = torch.tensor([2, 1, 3, 1])
    rows, teachers = chunk_bounds(shared, chunk_rows)
    of = torch.arange(4).repeat_interleave(shared)
    return TeacherRows(states, of, rows.tolist(), teachers.tolist())


def _plain_domino(inputs: tuple[torch.Tensor, ...], base_weight: float) -> torch.Tensor:
    x, head, codes, correction, weights, _ = inputs
    base = x @ head.T
    final = base + codes @ correction.T
    losses = [functional.cross_entropy(z, LABELS, reduction="none") for z in (final, base)]
    return (weights * ((1 - base_weight) * losses[0] + base_weight * losses[1])).sum()


def _plain_dspark(inputs: tuple[torch.Tensor, ...], ce_weight: float, l1_weight: float) -> torch.Tensor:
    x, head, codes, correction, weights, states = inputs
    z = x @ head.T + codes @ correction.T
    p = (states @ head.T).softmax(-1)[_teacher(states).teacher_of_R]
    l1 = (z.softmax(-1) - p).abs().sum(-1)
    return (weights * (ce_weight * functional.cross_entropy(z, LABELS, reduction="none") + l1_weight * l1)).sum()


def _gradients(loss: torch.Tensor, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(loss, (inputs[0], inputs[2], inputs[3]), materialize_grads=True, allow_unused=True)


@pytest.mark.parametrize("base_weight", [0.0, 0.3, 1.0])
def test_domino_equals_the_plain_formula(base_weight: float) -> None:
    inputs = _inputs(torch.float32)
    x, head, codes, correction, weights, _ = inputs
    result = corrected_ce_head(x, head, codes, correction, LABELS, weights, (0, 3, 3, ROWS), base_weight)
    plain = _plain_domino(inputs, base_weight)
    torch.testing.assert_close(result.loss, plain, rtol=1e-5, atol=0)
    for got, expected in zip(_gradients(3 * result.loss, inputs), _gradients(3 * plain, inputs), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    assert (result.final is None) == (base_weight == 1)
    assert (result.base is None) == (base_weight == 0)
    base = x @ head.T
    for part, z in ((result.final, base + codes @ correction.T), (result.base, base)):
        if part is not None:
            torch.testing.assert_close(part.ce_R, functional.cross_entropy(z, LABELS, reduction="none").detach())
            assert torch.equal(part.best_R, z.argmax(-1))


@pytest.mark.parametrize("base_weight", [0.0, 0.3])
def test_domino_gradient_is_exact(base_weight: float) -> None:
    x, head, codes, correction, weights, _ = _inputs(torch.float64)

    def loss(x: torch.Tensor, codes: torch.Tensor, correction: torch.Tensor) -> torch.Tensor:
        return corrected_ce_head(x, head, codes, correction, LABELS, weights, (0, 4, ROWS), base_weight).loss

    assert torch.autograd.gradcheck(loss, (x, codes, correction))


def test_domino_without_codes_needs_the_uncorrected_loss_alone() -> None:
    x, head, _, correction, weights, _ = _inputs(torch.float32)
    loss = corrected_ce_head(x, head, None, correction, LABELS, weights, (0, ROWS), 1.0).loss
    plain = (weights * functional.cross_entropy(x @ head.T, LABELS, reduction="none")).sum()
    torch.testing.assert_close(loss, plain, rtol=1e-5, atol=0)
    with pytest.raises(ValueError, match="needs codes"):
        corrected_ce_head(x, head, None, correction, LABELS, weights, (0, ROWS), 0.5)


def _row(p: list[float], q: list[float], ce_weight: float, l1_weight: float) -> tuple[Judged, torch.Tensor]:
    """One row of probabilities, label 0: the judgement and the gradient of its logits."""
    x = torch.tensor([q]).log().requires_grad_()
    size = len(q)
    judged = judged_head(
        x, torch.eye(size), torch.zeros(1, 1), torch.zeros(size, 1, requires_grad=True), torch.tensor([0]), torch.ones(1),
        TeacherRows(torch.tensor([p]).log(), torch.tensor([0]), (0, 1), (0, 1)), ce_weight, l1_weight,
    )  # fmt: skip
    judged.loss.backward()
    assert x.grad is not None
    return judged, x.grad[0]


def test_known_dspark_row() -> None:
    judged, grad = _row([0.7, 0.3], [0.6, 0.4], 0.0, 1.0)
    assert judged.ce_R.item() == pytest.approx(0.510826, abs=1e-6)
    assert judged.l1_R.item() == pytest.approx(0.2, abs=1e-6)
    assert judged.acceptance_R.item() == pytest.approx(0.9, abs=1e-6)
    torch.testing.assert_close(grad, torch.tensor([-0.48, 0.48]), atol=1e-6, rtol=0)
    for logit, expected in ((0.0, 0.693147), (2.0, 0.326928)):
        assert confidence_loss(torch.tensor([logit]), judged.acceptance_R).item() == pytest.approx(expected, abs=1e-6)
    whole, _ = _row([0.7, 0.3], [0.6, 0.4], 0.1, 0.9)
    assert whole.loss.item() + math.log(2) == pytest.approx(0.924230, abs=1e-6)


def test_tau_prob_of_a_block() -> None:
    acceptance = torch.tensor([0.9, 0.5, 0.8])
    zeros = torch.zeros(3)
    judged = Judged(zeros[0], zeros, 2 * (1 - acceptance), zeros, zeros, zeros.long(), zeros.long())
    numerator, denominator = teacher_metrics(judged, torch.arange(3), 1, 3)["tau_prob"]
    assert float(numerator / denominator) == pytest.approx(2.71)
    assert float(1 + chain_products(acceptance[[0, 2]], torch.tensor([0, 2]), 1, 3).sum()) == pytest.approx(1.9)


def test_dspark_equals_the_plain_formula() -> None:
    inputs = _inputs(torch.float32)
    x, head, codes, correction, weights, states = inputs
    judged = judged_head(x, head, codes, correction, LABELS, weights, _teacher(states), 0.1, 0.9)
    plain = _plain_dspark(inputs, 0.1, 0.9)
    torch.testing.assert_close(judged.loss, plain, rtol=1e-5, atol=0)
    for got, expected in zip(_gradients(3 * judged.loss, inputs), _gradients(3 * plain, inputs), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    q = (x @ head.T + codes @ correction.T).softmax(-1)
    p = (states @ head.T).softmax(-1)[_teacher(states).teacher_of_R]
    torch.testing.assert_close(judged.top_R, q.max(-1).values.detach())
    torch.testing.assert_close(judged.teacher_top_R, p.max(-1).values)
    assert torch.equal(judged.best_R, q.argmax(-1))
    assert torch.equal(judged.teacher_best_R, p.argmax(-1))


def test_dspark_gradient_is_exact() -> None:
    x, head, codes, correction, weights, states = _inputs(torch.float64)

    def loss(x: torch.Tensor, codes: torch.Tensor, correction: torch.Tensor) -> torch.Tensor:
        return judged_head(x, head, codes, correction, LABELS, weights, _teacher(states), 0.1, 0.9).loss

    assert torch.autograd.gradcheck(loss, (x, codes, correction))


@pytest.mark.parametrize("chunk_rows", [1, 2, 4, 100])
def test_chunks_change_nothing_and_part_no_teacher(chunk_rows: int) -> None:
    inputs = _inputs(torch.float64)
    x, head, codes, correction, weights, states = inputs
    teacher = _teacher(states, chunk_rows)
    assert (teacher.row_bounds[0], teacher.row_bounds[-1]) == (0, ROWS)
    assert (teacher.teacher_bounds[0], teacher.teacher_bounds[-1]) == (0, 4)
    for row, first in zip(teacher.row_bounds[:-1], teacher.teacher_bounds[:-1], strict=True):
        assert row == ROWS or not (teacher.teacher_of_R[:row] == first).any()
    whole = judged_head(x, head, codes, correction, LABELS, weights, _teacher(states, 100), 0.1, 0.9).loss
    parts = judged_head(x, head, codes, correction, LABELS, weights, teacher, 0.1, 0.9).loss
    for got, expected in zip(_gradients(parts, inputs), _gradients(whole, inputs), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-13)


def test_bf16_stays_close_to_fp32() -> None:
    exact, low = _inputs(torch.float32), _inputs(torch.bfloat16)
    for inputs in (exact, low):
        x, head, codes, correction, weights, states = inputs
        domino = corrected_ce_head(x, head, codes, correction, LABELS, weights, (0, 4, ROWS), 0.4).loss
        dspark = judged_head(x, head, codes, correction, LABELS, weights, _teacher(states), 0.1, 0.9).loss
        assert domino.dtype == dspark.dtype == torch.float32
        inputs[0].grad = None
        (domino + dspark).backward()
    for got, expected in zip((low[i].grad for i in (0, 2, 3)), (exact[i].grad for i in (0, 2, 3)), strict=True):
        assert got is not None
        assert expected is not None
        torch.testing.assert_close(got.float(), expected, rtol=0.0, atol=2e-2 * float(expected.abs().max()))
