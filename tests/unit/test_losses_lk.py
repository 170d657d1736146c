"""The LK losses: acceptance as an objective. Numbers worked out by hand, gradients, and what chunking must not change."""

import math

import pytest
import torch

from specfleet.trainer.strategies.soft_ce import Lk, Teacher, soft_ce_head
from specfleet.trainer.strategies.teacher import FrozenTeacher, needs_full_head

ALPHA = Lk("alpha")
MODES = [ALPHA, Lk("lambda"), Lk("lambda", per_token=False), Lk("lambda", scale=0.5, decay=1.0)]


def _row(p: list[float], q: list[float], lk: Lk) -> tuple[float, float, torch.Tensor]:
    """Loss, α and logit gradient of one row: teacher p over everything, draft q."""
    x = torch.tensor([q], dtype=torch.float64).log().requires_grad_()
    logits = torch.tensor([p], dtype=torch.float64).log()
    teacher = Teacher(logits, logits.logsumexp(-1), torch.zeros(1, dtype=torch.float64))
    result = soft_ce_head(
        x, torch.eye(len(p), dtype=torch.float64), teacher, torch.tensor([0]), torch.tensor([True]), lk=lk
    )
    result.loss.backward()
    assert result.alpha_R is not None
    assert x.grad is not None
    return float(result.loss.detach()), float(result.alpha_R), x.grad[0]


def test_known_row() -> None:
    """p = [.7, .3], q = [.6, .4]: α .9, CE .632465, and the three losses made of them."""
    ce, alpha, ce_grad = _row([0.7, 0.3], [0.6, 0.4], Lk())
    assert (ce, alpha) == (pytest.approx(0.632465, abs=1e-6), pytest.approx(0.9))
    entropy = -0.7 * math.log(0.7) - 0.3 * math.log(0.3)
    assert ce - entropy == pytest.approx(0.021601, abs=1e-6)
    loss, _, grad = _row([0.7, 0.3], [0.6, 0.4], ALPHA)
    assert loss == pytest.approx(0.105361, abs=1e-6)
    torch.testing.assert_close(grad, torch.tensor([-0.266667, 0.266667], dtype=torch.float64), atol=1e-6, rtol=0)
    overlap_grad = torch.tensor([0.24, -0.24], dtype=torch.float64)
    for decay, weight, expected, with_kl in ((1.0, 0.40657, 0.316484, 0.068125), (3.0, 0.067206, 0.135785, 0.094731)):
        for per_token in (True, False):  # one row is its own mean
            loss, _, grad = _row([0.7, 0.3], [0.6, 0.4], Lk("lambda", decay=decay, per_token=per_token))
            assert loss == pytest.approx(expected, abs=1e-6)
            assert loss - weight * entropy == pytest.approx(with_kl, abs=1e-6)
            torch.testing.assert_close(grad, weight * ce_grad - (1 - weight) * overlap_grad, atol=1e-5, rtol=0)


def test_lambda_follows_the_batch_or_the_row() -> None:
    """α = .9 and .5 with decay 1: the batch's λ is e^−.7 = .496585, the rows' .406570 and .606531."""
    ce, alpha = torch.tensor([1.0, 2.0]), torch.tensor([0.9, 0.5])
    live = torch.ones(2, dtype=torch.bool)
    for per_token, expected in ((False, [0.496585, 0.496585]), (True, [0.406570, 0.606531])):
        loss, by_ce, by_alpha = Lk("lambda", decay=1.0, per_token=per_token).loss(ce, alpha, live)
        torch.testing.assert_close(by_ce, torch.tensor(expected), atol=1e-6, rtol=0)
        torch.testing.assert_close(by_alpha, by_ce - 1)
        torch.testing.assert_close(loss, by_ce * ce + (1 - by_ce) * (1 - alpha))
    dead = Lk("lambda", decay=1.0, per_token=False).loss(ce, torch.tensor([0.9, math.nan]), torch.tensor([True, False]))
    torch.testing.assert_close(dead[1], torch.full((2,), math.exp(-0.9)))


def test_mass_outside_the_draft_vocabulary_costs_acceptance() -> None:
    """T = [.5, .3, .15, .05], kept {0, 1}: cross entropy wants [.625, .375], α reaches .8 at best."""
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]], dtype=torch.float64).log()
    judgement = FrozenTeacher(torch.eye(4, dtype=torch.float64), torch.tensor([0, 1]), full=True).judge(
        logits, {}, mass=True
    )
    x = torch.tensor([[0.625, 0.375]], dtype=torch.float64).log().requires_grad_()
    result = soft_ce_head(
        x, torch.eye(2, dtype=torch.float64), judgement.teacher, torch.tensor([0]), torch.tensor([True])
    )
    assert result.alpha_R is not None
    assert float(result.alpha_R) == pytest.approx(0.8)
    result.loss.backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, torch.zeros_like(x.grad), atol=1e-12, rtol=0)


def test_a_hopeless_row_still_has_a_slope() -> None:
    """α far below the bound: a finite loss, and a gradient that raises q where the teacher is."""
    loss, alpha, grad = _row([1 - 1e-9, 1e-9], [1e-7, 1 - 1e-7], ALPHA)
    assert alpha < 1e-5
    assert loss == pytest.approx(-math.log(1e-5) + 1.0, abs=0.02)
    assert grad[0] == pytest.approx(-1e-7 / 1e-5, rel=1e-3)


def _random(rows: int = 9) -> tuple[torch.Tensor, torch.Tensor, Teacher, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(rows, 5, generator=generator, dtype=torch.float64).requires_grad_()
    weight = torch.randn(6, 5, generator=generator, dtype=torch.float64).requires_grad_()
    logits = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    lse = logits.logsumexp(-1)
    judge = torch.randint(0, 4, (rows,), generator=generator)
    live = torch.arange(rows) % 4 != 2
    return x, weight, Teacher(logits, lse, lse + 0.2), judge, live


@pytest.mark.parametrize("lk", [ALPHA, Lk("lambda", decay=0.0)], ids=["alpha", "constant lambda"])
def test_gradients_are_exact_in_fp64(lk: Lk) -> None:
    x, weight, teacher, judge, live = _random()
    assert torch.autograd.gradcheck(lambda x, w: soft_ce_head(x, w, teacher, judge, live, 4, lk).loss, (x, weight))


@pytest.mark.parametrize("lk", MODES, ids=["alpha", "token", "batch", "scaled"])
def test_equals_the_plain_formula(lk: Lk) -> None:
    x, weight, teacher, judge, live = _random()
    result = soft_ce_head(x, weight, teacher, judge, live, 2, lk)
    assert teacher.full_lse_U is not None
    log_q = (x @ weight.T).log_softmax(-1)
    ce = -((teacher.logits_UV - teacher.lse_U[:, None]).exp()[judge] * log_q).sum(-1)
    alpha = torch.minimum((teacher.logits_UV - teacher.full_lse_U[:, None]).exp()[judge], log_q.exp()).sum(-1)
    if lk.kind == "alpha":
        plain = -alpha.log()
    else:
        base = alpha if lk.per_token else alpha[live].mean()
        mix = (lk.scale * torch.exp(-lk.decay * base)).detach()
        plain = mix * ce + (1 - mix) * (1 - alpha)
    torch.testing.assert_close(result.alpha_R, alpha.detach())
    torch.testing.assert_close(result.loss, plain[live].sum())
    for got, expected in zip(
        torch.autograd.grad(3.0 * result.loss, (x, weight)),
        torch.autograd.grad(3.0 * plain[live].sum(), (x, weight)),
        strict=True,
    ):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("lk", MODES, ids=["alpha", "token", "batch", "scaled"])
def test_chunk_size_changes_nothing(lk: Lk) -> None:
    x, weight, teacher, judge, live = _random()
    whole = torch.autograd.grad(soft_ce_head(x, weight, teacher, judge, live, lk=lk).loss, (x, weight))
    for chunk in (1, 4):
        parts = torch.autograd.grad(soft_ce_head(x, weight, teacher, judge, live, chunk, lk).loss, (x, weight))
        for got, expected in zip(parts, whole, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-13)


def test_a_dead_row_contributes_nothing_even_with_nan() -> None:
    x = torch.tensor([[math.nan, 1.0], [0.5, 0.1]], requires_grad=True)
    weight = torch.eye(2, requires_grad=True)
    teacher = Teacher(torch.tensor([[math.nan, 0.0], [0.5, 0.5]]), torch.full((2,), 1.2), torch.full((2,), 1.3))
    for lk in MODES:
        loss = soft_ce_head(x, weight, teacher, torch.tensor([0, 1]), torch.tensor([False, True]), lk=lk).loss
        grad_x, grad_weight = torch.autograd.grad(loss, (x, weight))
        assert loss.isfinite()
        assert not grad_x[0].any()
        assert grad_x[1].any()
        assert grad_weight.isfinite().all()


def test_a_frozen_head_costs_no_weight_gradient() -> None:
    x, weight, teacher, judge, live = _random()
    expected = torch.autograd.grad(soft_ce_head(x, weight, teacher, judge, live).loss, x)[0]
    frozen = soft_ce_head(x, weight.detach(), teacher, judge, live).loss
    frozen.backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, expected)


def test_an_lk_loss_needs_the_true_mass() -> None:
    x, weight, teacher, judge, live = _random()
    with pytest.raises(ValueError, match="whole vocabulary"):
        soft_ce_head(x, weight, Teacher(teacher.logits_UV, teacher.lse_U), judge, live, lk=ALPHA)


def test_captured_facts_spare_the_full_vocabulary() -> None:
    """With both facts captured the whole head is not even kept; what is missing decides whether it must be."""
    assert needs_full_head([], mass=False)
    assert needs_full_head(["teacher_lse"], mass=False)
    assert not needs_full_head(["teacher_argmax"], mass=False)
    assert needs_full_head(["teacher_argmax"], mass=True)
    assert not needs_full_head(["teacher_argmax", "teacher_lse"], mass=True)
    generator = torch.Generator().manual_seed(1)
    head, states = torch.randn(12, 4, generator=generator), torch.randn(700, 4, generator=generator)
    logits = states @ head.T
    facts = {"teacher_argmax": logits.argmax(-1).int(), "teacher_lse": logits.logsumexp(-1)}
    chosen = torch.tensor([1, 4, 7])
    computed = FrozenTeacher(head, chosen, full=True).judge(states, {}, mass=True)
    lean = FrozenTeacher(head, chosen, full=False)
    captured = lean.judge(states, facts, mass=True)
    assert torch.equal(computed.argmax_U, captured.argmax_U)
    assert computed.teacher.full_lse_U is not None
    torch.testing.assert_close(computed.teacher.full_lse_U, captured.teacher.full_lse_U)
    # The argmax alone is enough for cross entropy, which then knows no α.
    assert lean.judge(states, {"teacher_argmax": facts["teacher_argmax"]}, mass=False).teacher.full_lse_U is None
    with pytest.raises(ValueError, match="without the full head"):
        lean.judge(states, {}, mass=False)


def test_a_full_draft_vocabulary_is_its_own_full_pass() -> None:
    states = torch.randn(5, 4, generator=torch.Generator().manual_seed(2))
    judgement = FrozenTeacher(torch.eye(4), torch.arange(4), full=False).judge(states, {}, mass=True)
    assert torch.equal(judgement.argmax_U, states.argmax(-1))
    assert judgement.teacher.full_lse_U is judgement.teacher.lse_U
