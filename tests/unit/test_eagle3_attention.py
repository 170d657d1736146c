"""Rollout attention against the boolean mask it stands for, and the layers under it."""

import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from specfleet.contracts.errors import ConfigError
from specfleet.drafts.layers import RMSNorm, Rope, rope_frequencies
from specfleet.drafts.ttt_attention import ttt_attention


def rollout_mask(length: int, padded: int, step: int) -> torch.Tensor:
    """[T, (step+1)·T] bool, written straight from the definition: prefix keys, then one block of T keys per step."""
    n = length - step
    q = torch.arange(padded)[:, None]
    kv = torch.arange((step + 1) * padded)[None, :]
    prefix = (kv <= q) & (kv < n)
    own = (kv >= padded) & (kv % padded < n) & ((kv - q) % padded == 0)
    return (q < n) & (prefix | own)


def dense(q: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor], mask: torch.Tensor) -> torch.Tensor:
    """q [T, n_q, d]; one [T, n_kv, d] per step; masked softmax over all of them, query by query."""
    groups = q.shape[1] // keys[0].shape[1]
    k = torch.cat(keys).repeat_interleave(groups, dim=1)
    v = torch.cat(values).repeat_interleave(groups, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
    weights = scores.masked_fill(~mask, -math.inf).softmax(-1).nan_to_num(0.0)
    return torch.einsum("hqk,khd->qhd", weights, v)


def test_mask_example() -> None:
    seen = [set(row.nonzero().flatten().tolist()) for row in rollout_mask(4, 4, 1)]
    assert seen == [{0, 4}, {0, 1, 5}, {0, 1, 2, 6}, set()]


def _case(step: int, lengths: list[int], dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    padded = max(lengths)

    def make(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype).requires_grad_()

    case = {"q": make(len(lengths), padded, 4, 8)}
    for j in range(step + 1):
        case[f"k{j}"], case[f"v{j}"] = make(len(lengths), padded, 2, 8), make(len(lengths), padded, 2, 8)
    return case


def _fast(case: dict[str, torch.Tensor], step: int, rows: torch.Tensor) -> torch.Tensor:
    prefix = [case[name].transpose(1, 2).repeat_interleave(2, dim=1) for name in ("k0", "v0")]
    flat = {name: x.flatten(0, 1)[rows] for name, x in case.items() if name not in ("k0", "v0")}
    steps = range(1, step + 1)
    own = [torch.stack([flat[f"{name}{j}"] for j in steps]) for name in "kv"] if step else []
    return ttt_attention(flat["q"], *prefix, rows, torch.stack(own) if own else None)


@pytest.mark.parametrize("step", [0, 1, 3])
def test_equals_dense_attention_with_its_gradients(step: int) -> None:
    lengths = [9, 6]
    case = _case(step, lengths)
    valid = [[t for t in range(2, n - step)] for n in lengths]
    rows = torch.tensor([b * 9 + t for b in range(2) for t in valid[b]])
    expected = torch.cat(
        [
            dense(
                case["q"][b], [case[f"k{j}"][b] for j in range(step + 1)], [case[f"v{j}"][b] for j in range(step + 1)],
                rollout_mask(lengths[b], 9, step),
            )[valid[b]]
            for b in range(2)
        ]
    )  # fmt: skip
    got = _fast(case, step, rows)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)
    weights = torch.randn(got.shape, generator=torch.Generator().manual_seed(9), dtype=got.dtype)
    inputs = list(case.values())
    for a, b in zip(
        torch.autograd.grad((got * weights).sum(), inputs),
        torch.autograd.grad((expected * weights).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_stays_close(dtype: torch.dtype) -> None:
    exact = _case(2, [12])
    low = {name: x.detach().to(dtype) for name, x in exact.items()}
    rows = torch.arange(10)
    gap = (_fast(low, 2, rows).double() - _fast(exact, 2, rows)).abs().max()
    assert gap < (1e-5 if dtype == torch.float32 else 3e-2)


def test_merge_example() -> None:
    """Prefix logits [0, 0] with values 1 and 3, own logit ln 2 with value 5: (1 + 3 + 2·5) / 4.

    Their log-sum-exp is ln 4: one more key of that logit and value 0 halves the result.
    """
    q = torch.zeros(1, 1, 8, dtype=torch.float64)
    q[..., 0] = math.sqrt(8)
    keys = torch.zeros(1, 1, 2, 8, dtype=torch.float64)
    values = torch.tensor([1.0, 3.0], dtype=torch.float64).view(1, 1, 2, 1).expand(1, 1, 2, 8).contiguous()
    own_key = torch.zeros(1, 1, 8, dtype=torch.float64)
    own_key[..., 0] = math.log(2)
    own_value = torch.full((1, 1, 8), 5.0, dtype=torch.float64)
    own = torch.stack((own_key, own_value))[:, None]
    out = ttt_attention(q, keys, values, torch.tensor([1]), own)
    torch.testing.assert_close(out, torch.full_like(out, 3.5))
    more = torch.cat((own, torch.stack((2 * own_key, 0 * own_value))[:, None]), dim=1)
    torch.testing.assert_close(ttt_attention(q, keys, values, torch.tensor([1]), more), torch.full_like(out, 1.75))


def test_rms_norm_example() -> None:
    norm = RMSNorm(2, eps=1e-6)
    torch.testing.assert_close(norm(torch.tensor([3.0, 4.0])), torch.tensor([0.848528, 1.131371]), atol=1e-5, rtol=0)
    assert norm.to(torch.bfloat16)(torch.tensor([3.0, 4.0], dtype=torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 4.0},
        {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 512,
        },
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "mscale": 1.0, "mscale_all_dim": 0.5},
    ],
    ids=lambda scaling: scaling["rope_type"],
)  # fmt: skip
def test_scaled_frequencies_equal_those_of_the_targets(scaling: dict[str, float]) -> None:
    config = LlamaConfig(
        hidden_size=256, num_attention_heads=4, head_dim=64, max_position_embeddings=2048,
        rope_parameters={**scaling, "rope_theta": 5e5},
    )  # fmt: skip
    expected, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, torch.device("cpu"))
    got, got_factor = rope_frequencies(64, 5e5, scaling, 2048)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=0)
    assert got_factor == pytest.approx(factor)


def test_rotation_keeps_relative_positions_and_frequencies_stay_fp32() -> None:
    rope = Rope(8, 10000.0, None, 2048)
    q, k = torch.randn(2, 1, 1, 8, generator=torch.Generator().manual_seed(1))

    def score(i: int, j: int) -> torch.Tensor:
        rotate = [rope.at(torch.tensor([p]), torch.float32) for p in (i, j)]
        return (rotate[0].apply(q) * rotate[1].apply(k)).sum()

    torch.testing.assert_close(score(7, 3), score(104, 100), atol=1e-4, rtol=0)
    assert not torch.isclose(score(7, 3), score(7, 4))
    # Position 1999 in bf16 would be 2000: angles must not be formed in the draft's dtype.
    low = rope.at(torch.tensor([1999]), torch.bfloat16).apply(torch.ones(1, 1, 8, dtype=torch.bfloat16))
    exact = rope.at(torch.tensor([1999]), torch.float32).apply(torch.ones(1, 1, 8))
    torch.testing.assert_close(low.float(), exact, atol=2e-2, rtol=0)


def test_unknown_scaling_is_refused() -> None:
    with pytest.raises(ConfigError, match="longrope"):
        rope_frequencies(64, 1e4, {"rope_type": "longrope"}, 2048)
