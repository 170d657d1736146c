"""AdamW over fp32 masters against torch's own, and the closed-form schedule."""

import copy
import math

import pytest
import torch
from torch import nn

from specfleet.contracts.errors import ContractError
from specfleet.trainer.optim import MasterAdamW, learning_rate
from specfleet.trainer.parallel import Ranks


def make_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)


def make_optimizer(model: nn.Module, **options: float) -> MasterAdamW:
    return MasterAdamW(model.named_parameters(), betas=(0.9, 0.95), weight_decay=0.1, max_grad_norm=0.5, **options)


@pytest.mark.parametrize(
    ("k", "expected"), [(0, 0.1), (4, 0.5), (9, 1.0), (10, 1.0), (55, 0.5), (100, 0.0), (250, 0.0)]
)
def test_schedule_values(k: int, expected: float) -> None:
    assert learning_rate(k, peak=1.0, total=100, warmup_ratio=0.1) == pytest.approx(expected, abs=1e-12)


def test_schedule_without_warmup_or_decay() -> None:
    assert learning_rate(0, peak=2.0, total=3, warmup_ratio=0.1) == 2.0
    assert learning_rate(99, peak=2.0, total=100, warmup_ratio=0.1, schedule="constant") == 2.0
    assert learning_rate(0, peak=2.0, total=0, warmup_ratio=0.0) == 2.0


def test_equals_torch_adamw_with_clipping_and_accumulation() -> None:
    ours, reference = make_model(), make_model()
    optimizer = make_optimizer(ours)
    plain = torch.optim.AdamW(reference.parameters(), lr=1.0, betas=(0.9, 0.95), weight_decay=0.1, fused=False)
    clipped = 0
    for k in range(8):
        torch.manual_seed(k)
        micro_batches = [torch.randn(n, 5) for n in (4, 2)]
        lr = learning_rate(k, peak=1e-2, total=8, warmup_ratio=0.25)
        for x in micro_batches:
            ours(x).square().sum().backward()
            optimizer.collect()
        norm = float(optimizer.step(lr, Ranks()))
        reference(torch.cat(micro_batches)).square().sum().backward()
        expected_norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        plain.param_groups[0]["lr"] = lr
        plain.step()
        plain.zero_grad()
        clipped += norm > 0.5
        assert norm == pytest.approx(float(expected_norm), rel=1e-5)
        for a, b in zip(ours.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert clipped > 0


def test_masters_keep_what_bf16_would_round_away() -> None:
    weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    optimizer = MasterAdamW([("weight", weight)], max_grad_norm=10.0)
    for _ in range(8):
        (weight.float() * 1.0).sum().backward()
        optimizer.collect()
        optimizer.step(1e-3, Ranks())
    # One step of 1e-3 is below half a bf16 ulp at 1 (2⁻⁹): without masters the weight would still be 1.
    assert weight.item() == pytest.approx(1 - 8e-3, abs=2**-8)
    assert weight.item() < 1.0
    assert float(optimizer.state()["master.weight"]) == pytest.approx(1 - 8e-3, abs=1e-5)


def test_frozen_parameters_and_missing_gradients() -> None:
    model = make_model()
    model[0].weight.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    optimizer = MasterAdamW(model.named_parameters())
    model[2].bias.grad = torch.ones(3)
    optimizer.collect()
    optimizer.step(1e-2, Ranks())
    assert "0.weight" not in optimizer.names
    assert torch.equal(model[0].weight, before["0.weight"])
    assert torch.equal(model[2].weight, before["2.weight"])
    assert not torch.equal(model[2].bias, before["2.bias"])


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    model = make_model()
    optimizer = make_optimizer(model)
    before = {name: tensor.clone() for name, tensor in optimizer.state().items()}
    model[0].bias.grad = torch.full((7,), math.nan)
    optimizer.collect()
    assert math.isnan(float(optimizer.step(1e-2, Ranks())))
    assert all(torch.equal(before[name], tensor) for name, tensor in optimizer.state().items())
    model[0].bias.grad = torch.ones(7)
    optimizer.collect()
    assert float(optimizer.step(1e-2, Ranks())) == pytest.approx(math.sqrt(7))


def test_state_round_trip_continues_identically() -> None:
    first, second = make_model(torch.bfloat16), make_model(torch.bfloat16)
    a, b = make_optimizer(first), make_optimizer(second)

    def steps(model: nn.Module, optimizer: MasterAdamW, seeds: range) -> None:
        for seed in seeds:
            torch.manual_seed(seed)
            model(torch.randn(4, 5, dtype=torch.bfloat16)).float().square().sum().backward()
            optimizer.collect()
            optimizer.step(1e-2, Ranks())

    steps(first, a, range(3))
    b.load({name: tensor.clone() for name, tensor in a.state().items()})
    steps(first, a, range(3, 6))
    steps(second, b, range(3, 6))
    assert all(torch.equal(tensor, b.state()[name]) for name, tensor in a.state().items())
    assert all(torch.equal(x, y) for x, y in zip(first.parameters(), second.parameters(), strict=True))


def test_state_of_another_draft_is_refused() -> None:
    optimizer = make_optimizer(make_model())
    entries = {name: tensor.clone() for name, tensor in optimizer.state().items()}
    entries["exp_avg.0.weight"] = torch.zeros(7, 6)
    with pytest.raises(ContractError, match=r"exp_avg\.0\.weight") as caught:
        optimizer.load(entries)
    assert caught.value.code == "SF-CHECKPOINT-OPTIMIZER"
