"""Hard cross entropy through a frozen head, and the D-PACE weights, against numbers worked out by hand."""

import itertools

import pytest
import torch
from torch.nn import functional

from specfleet.trainer.strategies.dflash.objective import Loss, dpace_rows, dpace_weights
from specfleet.trainer.strategies.hard_ce import hard_ce_head


def _case(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(7, 5, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    head = torch.randn(11, 5, generator=generator, dtype=torch.float64).to(dtype)
    return (
        x,
        head,
        torch.randint(0, 11, (7,), generator=generator),
        torch.rand(7, generator=generator, dtype=torch.float64),
    )


@pytest.mark.parametrize("bounds", [[0, 7], [0, 1, 1, 4, 7], list(range(8))])
def test_equals_torch_and_does_not_depend_on_chunks(bounds: list[int]) -> None:
    x, head, labels, weights = _case()
    loss, losses, best = hard_ce_head(x, head, labels, weights, bounds)
    expected = functional.cross_entropy(x @ head.T, labels, reduction="none")
    torch.testing.assert_close(losses, expected.detach(), rtol=1e-12, atol=0)
    assert torch.equal(best, (x @ head.T).argmax(-1))
    for scale in (1.0, -0.37):
        (ours,) = torch.autograd.grad(loss * scale, x, retain_graph=True)
        (theirs,) = torch.autograd.grad((expected * weights).sum() * scale, x, retain_graph=True)
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-14)
    assert torch.autograd.gradcheck(lambda x: hard_ce_head(x, head, labels, weights, bounds)[0], (x,))


def test_bf16_head_is_close_and_sums_in_fp32() -> None:
    x, head, labels, weights = _case(torch.bfloat16)
    loss, losses, _ = hard_ce_head(x, head, labels, weights, [0, 3, 7])
    expected = functional.cross_entropy(x.double() @ head.double().T, labels, reduction="none")
    assert loss.dtype == losses.dtype == torch.float32
    torch.testing.assert_close(losses.double(), expected, rtol=2e-2, atol=2e-2)
    (ours,) = torch.autograd.grad(loss, x, retain_graph=True)
    (theirs,) = torch.autograd.grad((expected * weights).sum(), x)
    torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


def test_large_logits_do_not_overflow() -> None:
    x = torch.tensor([[1e4, -1e4]], requires_grad=True)
    loss, losses, _ = hard_ce_head(x, torch.eye(2), torch.tensor([1]), torch.ones(1), [0, 1])
    loss.backward()
    assert float(losses) == pytest.approx(2e4)
    assert x.grad is not None
    assert x.grad.tolist() == [[1.0, -1.0]]


def test_decayed_loss_of_the_specification() -> None:
    """G = 4, γ = 2, cross entropies 1, 2, 3 of slots 1 … 3."""
    from specfleet.trainer.strategies.anchors import slot_decay

    losses, decay = torch.tensor([1.0, 2.0, 3.0]), slot_decay(4, 1, 2.0)[1:]
    assert float((losses * decay).sum() / decay.sum()) == pytest.approx(1.679843, abs=1e-6)
    plain = slot_decay(4, 1, None)[1:]
    assert float((losses * plain).sum() / plain.sum()) == pytest.approx(2.0)


VALID = torch.tensor([[False, True, True, True]])


@pytest.mark.parametrize(
    ("loss", "weights", "total"),
    [
        ("dpace", [1.734375, 0.984375, 0.421875], 2.176915),
        ("dpace_cumulative", [0.75, 0.5625, 0.421875], 1.202177),
        ("dpace_continuation", [2.3125, 1.75, 1.0], 3.509058),
    ],
)
def test_dpace_and_its_ablations(loss: Loss, weights: list[float], total: float) -> None:
    confidence = torch.tensor([[0.123, 0.5, 0.5, 0.5]], dtype=torch.float64)
    found = dpace_weights(confidence, VALID, 0.5, loss)
    assert found[0].tolist() == pytest.approx([0.0, *weights])
    assert float((found * -confidence.log()).sum()) == pytest.approx(total, abs=1e-6)


def test_dpace_skips_slots_that_do_not_count() -> None:
    confidence = torch.tensor([[1.0, 0.8, 0.4, 0.9]], dtype=torch.float64)
    found = dpace_weights(confidence, torch.tensor([[False, True, True, False]]), 0.5, "dpace")
    assert found[0].tolist() == pytest.approx([0, 1.53, 0.63, 0])
    assert float((found * -confidence.log()).sum()) == pytest.approx(0.918673, abs=1e-6)


def test_dpace_limits() -> None:
    confidence = torch.full((1, 4), 0.5)
    assert dpace_weights(confidence, VALID, 1.0, "dpace")[0].tolist() == [0, 3, 2, 1]
    assert dpace_weights(confidence, VALID, 0.0, "dpace")[0].tolist() == [0, 0.875, 0.375, 0.125]
    hopeless = dpace_weights(torch.zeros(1, 4), VALID, 0.0, "dpace_continuation")
    assert hopeless.isfinite().all()


def test_dpace_is_the_gradient_of_the_expected_accepted_length() -> None:
    """With α = 0, W_j = ∂/∂log q_j of Σ_j Π_{u≤j} q_u."""
    logs = torch.tensor([-0.3, -1.1, -0.2, -0.7], dtype=torch.float64, requires_grad=True)
    logs.exp().cumprod(0).sum().backward()
    found = dpace_weights(logs.detach().exp()[None], torch.ones(1, 4, dtype=torch.bool), 0.0, "dpace")
    torch.testing.assert_close(found[0], logs.grad)


@pytest.mark.parametrize("chunk_blocks", [1, 2, 3])
def test_dpace_rows_match_whole_blocks(chunk_blocks: int) -> None:
    """Weights found chunk by chunk from compacted rows equal those of the dense blocks; empty blocks do no harm."""
    valid = torch.tensor([[0, 0, 0, 0], [0, 1, 1, 0], [0, 1, 1, 1]]).bool()
    losses = torch.rand(5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    rows = valid.flatten().nonzero().flatten()
    block_bounds = [*range(0, 3, chunk_blocks), 3]
    row_bounds = [int(valid[:end].sum()) for end in block_bounds]
    weigh = dpace_rows(rows, row_bounds, block_bounds, 4, 0.5, "dpace")
    confidence = torch.ones(3, 4, dtype=torch.float64)
    confidence[valid] = torch.exp(-losses)
    expected = dpace_weights(confidence, valid, 0.5, "dpace")[valid]
    found = [
        weigh(losses[start:stop], slice(start, stop)) for start, stop in itertools.pairwise(row_bounds) if start < stop
    ]
    torch.testing.assert_close(torch.cat(found), expected)
