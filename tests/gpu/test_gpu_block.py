"""What block drafts run on CUDA against the CPU's. Skipped without a GPU."""

from typing import Any

import pytest
import torch
from fixtures.block_attention import Case, random_case, small_case, with_gradients
from fixtures.blocks import frozen_matrices, random_features, tiny_dflash
from fixtures.corrected import domino_strategy, dspark_strategy, tiny_domino, tiny_dspark

from specfleet.config.strategies import DFlashSection
from specfleet.drafts.block_attention import block_attention
from specfleet.trainer.loader import page_locked
from specfleet.trainer.strategies.base import Strategy
from specfleet.trainer.strategies.dflash import DFlashStrategy
from specfleet.trainer.strategies.hard_ce import hard_ce_head

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CASES = {
    "tiny": small_case(),
    "SmolLM2": random_case([150, 1, 97, 600], 256, slots=8, heads=9, kv_heads=3, dim=64, first_anchor=0),
    "Qwen3-8B": random_case([1800, 400], 128, slots=16, heads=32, kv_heads=8, dim=128),
    "odd sizes": random_case([150, 97], 40, slots=7, heads=10, kv_heads=2, dim=80),
    "wide heads": random_case([300], 60, slots=16, heads=8, kv_heads=1, dim=256),
}


def _attention(case: Case, device: str, dtype: torch.dtype, window: int | None) -> list[torch.Tensor]:
    """Output and gradients of inputs that bf16 holds exactly."""
    tensors = [
        tensor.detach().to(torch.bfloat16).to(device, dtype).requires_grad_() for tensor in case.tensors(torch.float32)
    ]
    places = case.anchors_N.to(device), case.starts_N.to(device)
    return with_gradients(block_attention(*tensors, *places, window), tensors)


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture(scope="module", params=[None, 19])
def expected(request: pytest.FixtureRequest, case: Case) -> tuple[int | None, list[torch.Tensor]]:
    return request.param, _attention(case, "cpu", torch.float64, request.param)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
def test_attention_equals_the_cpus(
    case: Case, expected: tuple[int | None, list[torch.Tensor]], dtype: torch.dtype, tolerance: float
) -> None:
    window, exact = expected
    for ours, theirs in zip(_attention(case, "cuda", dtype, window), exact, strict=True):
        assert bool(ours.isfinite().all())
        assert float((ours - theirs).norm()) < tolerance * float(theirs.norm())


def test_attention_repeats_itself_exactly() -> None:
    first, second = (_attention(CASES["SmolLM2"], "cuda", torch.bfloat16, None) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_more_elements_than_32_bits_count() -> None:
    """The last blocks of a batch whose queries have more than 2³¹ elements come out as on their own."""
    if torch.cuda.get_device_properties(0).total_memory < 40 * 2**30:
        pytest.skip("needs 40 GiB of GPU memory")
    slots, heads, dim, blocks = 16, 64, 256, 8200
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    q, own = random(blocks, slots, heads, dim), [random(blocks, slots, 1, dim) for _ in range(2)]
    context = [random(32, 1, dim) for _ in range(2)]
    anchors = torch.arange(blocks, device="cuda") * 32 // blocks
    starts = torch.zeros_like(anchors)
    assert q.numel() > 2**31
    results = []
    for part in (slice(0, blocks), slice(blocks - 5, blocks)):
        tensors = [x[part].detach().requires_grad_() for x in (q, *own)]
        out = block_attention(tensors[0], *context, *tensors[1:], anchors[part], starts[part])
        results.append([x[-5:] for x in (out.detach(), *torch.autograd.grad(out.sum(), tensors))])
    for whole, alone in zip(*results, strict=True):
        assert float((whole.double() - alone.double()).norm()) <= 1e-2 * float(alone.double().norm())


def _strategies(dtype: torch.dtype) -> dict[str, Strategy]:
    matrices = [matrix.to(dtype) for matrix in frozen_matrices()]
    dflash = DFlashSection(name="dflash", block_size=5, num_anchors=9, chunk_blocks=4)
    rest: dict[str, Any] = {"num_anchors": 9, "chunk_blocks": 4}
    return {
        "dflash": DFlashStrategy(dflash, tiny_dflash(dtype=dtype), *matrices),
        "dpace": DFlashStrategy(dflash.model_copy(update={"loss": "dpace"}), tiny_dflash(dtype=dtype), *matrices),
        "domino": domino_strategy(tiny_domino(dtype=dtype), *matrices, block_size=5, **rest),
        "domino, both losses": domino_strategy(tiny_domino(dtype=dtype), *matrices, 10, block_size=5, base_weight=0.5, **rest),
        "dspark": dspark_strategy(tiny_dspark(dtype=dtype), *matrices, block_size=4, **rest),
        "dspark, rnn": dspark_strategy(tiny_dspark(dtype=dtype, markov_head="rnn"), *matrices, block_size=4, **rest),
    }  # fmt: skip


def _gradient(strategy: Strategy, device: str, dtype: torch.dtype) -> torch.Tensor:
    strategy.draft.to(device)
    for name in ("_embedding", "_head"):
        setattr(strategy, name, getattr(strategy, name).to(device))
    prepared = strategy.prepare(strategy.collate(random_features([30, 1, 17, 42], dtype=dtype)))
    objective = strategy.objective(prepared)
    torch.stack(list(objective.numerators.values())).sum().backward()
    return torch.cat([parameter.grad.flatten().cpu().double() for parameter in strategy.draft.parameters()])  # type: ignore[union-attr]


# torch lays the weights of a GRU side by side for cuDNN, but not those in bf16: cuDNN copies them in every call.
@pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk of memory")
@pytest.mark.parametrize("name", _strategies(torch.float32))
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.05)])
def test_a_step_has_the_cpus_gradient(
    name: str, dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # Domino's recurrence
    exact = _gradient(_strategies(torch.float64)[name], "cpu", torch.float64)
    found = _gradient(_strategies(dtype)[name], "cuda", dtype)
    assert float((found - exact).norm()) < tolerance * float(exact.norm())


def test_states_are_collated_into_page_locked_memory() -> None:
    embedding, head = (matrix.cuda() for matrix in frozen_matrices(torch.float32))
    strategy = dspark_strategy(tiny_dspark(dtype=torch.float32).cuda(), embedding, head, block_size=4)
    features = random_features([30, 1, 17])
    collated = strategy.collate(features)
    batch = page_locked(strategy.collate, torch.device("cuda"))(features)
    assert all(collated[name].is_pinned() for name in ("context_states", "teacher_states"))
    assert all(tensor.is_pinned() for tensor in batch.values())
    assert all(torch.equal(batch[name], collated[name]) for name in collated)


def test_cross_entropy_equals_the_cpus() -> None:
    generator = torch.Generator().manual_seed(0)
    x, head = (torch.randn(n, 64, generator=generator).to(torch.bfloat16) for n in (100, 10007))
    labels, weights = torch.randint(0, 10007, (100,), generator=generator), torch.rand(100, generator=generator)
    results = []
    for device, dtype in (("cpu", torch.float64), ("cuda", torch.bfloat16)):
        rows = x.to(device, dtype).requires_grad_()
        loss, _, _ = hard_ce_head(rows, head.to(device, dtype), labels.to(device), weights.to(device), [0, 37, 100])
        results.append((float(loss.detach()), torch.autograd.grad(loss, rows)[0].cpu().double()))
    assert results[1][0] == pytest.approx(results[0][0], rel=1e-2)
    assert float((results[1][1] - results[0][1]).norm() / results[0][1].norm()) < 2e-2
