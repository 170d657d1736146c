"""Layers every draft architecture is made of. R rows, H hidden size, d head dimension, n_q / n_kv query and key heads."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from specfleet.contracts.errors import ConfigError


class RMSNorm(nn.Module):
    """x · weight / sqrt(mean(x²) + eps): statistics in fp32, rounded to the input dtype before the weight is applied."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * functional.rms_norm(x, x.shape[-1:], None, self.eps)


class SwiGLU(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class ExpertMLP(nn.Module):
    """A mixture of SwiGLU experts, of which each row uses its `per_token` likeliest (weights renormalised over those).

    Dense dispatch: every expert computes every row and unused results are weighted zero. That wastes arithmetic and keeps
    shapes static, gradients exact and every parameter in the graph, which is what an experiment on small drafts needs.
    """

    def __init__(self, hidden_size: int, intermediate_size: int, experts: int, per_token: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden_size, experts, bias=False)
        self.experts = nn.ModuleList(SwiGLU(hidden_size, intermediate_size) for _ in range(experts))
        self.per_token = per_token

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.gate(x)
        top = scores.topk(self.per_token, dim=-1)
        chosen = torch.full_like(scores, -torch.inf).scatter(-1, top.indices, top.values)
        weights = torch.softmax(chosen.to(torch.promote_types(x.dtype, torch.float32)), -1).to(x.dtype)
        outputs = torch.stack([expert(x) for expert in self.experts], dim=-1)
        return (outputs * weights[..., None, :]).sum(-1)


class GroupedQueryProjections(nn.Module):
    """The four projections of grouped-query attention. The attention itself differs between training and decoding."""

    def __init__(
        self, input_size: int, hidden_size: int, num_heads: int, num_key_value_heads: int, head_dim: int
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.q_proj = nn.Linear(input_size, num_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(input_size, num_key_value_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(input_size, num_key_value_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=False)

    def queries(self, x_RD: torch.Tensor, rotation: "Rotation") -> torch.Tensor:
        """[R, n_q, d], rotated."""
        return rotation.apply(self.q_proj(x_RD).unflatten(-1, (-1, self.head_dim)))

    def keys_values(self, x_RD: torch.Tensor, rotation: "Rotation") -> tuple[torch.Tensor, torch.Tensor]:
        """Keys (rotated) and values, both [R, n_kv, d]."""
        keys = rotation.apply(self.k_proj(x_RD).unflatten(-1, (-1, self.head_dim)))
        return keys, self.v_proj(x_RD).unflatten(-1, (-1, self.head_dim))


class DecoderLayer(nn.Module):
    """A pre-norm decoder layer. Whoever attends to what is outside: it gets projections and hands the attended rows back."""

    def __init__(self, size: int, eps: float, attention: GroupedQueryProjections, mlp: nn.Module) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(size, eps)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.self_attn = attention
        self.mlp = mlp

    def finish(self, residual_RH: torch.Tensor, attended_RNd: torch.Tensor) -> torch.Tensor:
        """What follows the attention."""
        hidden_RH = residual_RH + self.self_attn.o_proj(attended_RNd.flatten(1))
        return hidden_RH + self.mlp(self.post_attention_layernorm(hidden_RH))


class Rotation:
    """Cosines and sines of R positions, ready to rotate [R, heads, d] (halves layout, as in Llama)."""

    def __init__(self, cos_R1d: torch.Tensor, sin_R1d: torch.Tensor) -> None:
        """sin: negative in the first half, so that rotating takes no negation."""
        self._cos, self._sin = cos_R1d, sin_R1d

    def apply(self, x_RNd: torch.Tensor) -> torch.Tensor:
        return x_RNd * self._cos + x_RNd.roll(x_RNd.shape[-1] // 2, -1) * self._sin

    def rows(self, index_R: torch.Tensor) -> "Rotation":
        return Rotation(self._cos[index_R], self._sin[index_R])


class Rope:
    """Rotary positions (arXiv 2104.09864) with the scaling variants serving engines implement.

    Not a module: casting the draft to bfloat16 must not round the frequencies.
    """

    def __init__(self, head_dim: int, theta: float, scaling: Mapping[str, Any] | None, max_position: int) -> None:
        self._inv_freq, self._factor = rope_frequencies(head_dim, theta, scaling, max_position)

    def at(self, positions_R: torch.Tensor, dtype: torch.dtype) -> Rotation:
        if self._inv_freq.device != positions_R.device:
            self._inv_freq = self._inv_freq.to(positions_R.device)
        angles = positions_R.to(torch.float32)[:, None, None] * self._inv_freq
        cos, sin = (angles.cos() * self._factor).to(dtype), (angles.sin() * self._factor).to(dtype)
        return Rotation(torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1))


def rope_frequencies(
    head_dim: int, theta: float, scaling: Mapping[str, Any] | None, max_position: int
) -> tuple[torch.Tensor, float]:
    """Inverse frequencies [d/2] in fp32 and the factor on cos and sin.

    Raises ConfigError SF-DRAFT-ROPE for a scaling type this project (or no engine) can serve.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    inv_freq = theta**-exponents
    scaling = scaling or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    match kind:
        case "default" | "mrope":  # with text-only positions mrope's three axes coincide
            return inv_freq, 1.0
        case "linear":
            return inv_freq / scaling["factor"], 1.0
        case "dynamic":
            # Engines build one table for the longest sequence they allow, factor × max_position; frequencies that depend on
            # the current length (as in transformers) could not be reproduced there.
            factor = scaling["factor"]
            length = factor * max_position
            base = theta * ((factor * length / max_position) - (factor - 1)) ** (head_dim / (head_dim - 2))
            return base**-exponents, 1.0
        case "llama3":
            return _llama3(inv_freq, scaling), 1.0
        case "yarn":
            return _yarn(inv_freq, head_dim, theta, scaling, max_position)
    raise ConfigError(
        "SF-DRAFT-ROPE",
        f"drafts rotate as their target does, and rope type {kind!r} is not supported; supported: default, linear, dynamic, "
        "llama3, yarn, mrope. Choose a target with one of these",
    )


def _llama3(inv_freq: torch.Tensor, scaling: Mapping[str, Any]) -> torch.Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, those between interpolated."""
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = (
        scaling["original_max_position_embeddings"] * inv_freq / (2 * math.pi)
    )  # rotations over the original context
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return inv_freq * (keep + (1 - keep) / factor)


def _yarn(
    inv_freq: torch.Tensor, head_dim: int, theta: float, scaling: Mapping[str, Any], max_position: int
) -> tuple[torch.Tensor, float]:
    """YaRN (arXiv 2309.00071): interpolate dimensions that turn seldom, keep those that turn often, ramp between."""
    original = scaling.get("original_max_position_embeddings") or max_position
    factor = scaling.get("factor") or max_position / original

    def dimension(turns: float) -> float:
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension(scaling.get("beta_fast") or 32)
    high = dimension(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / max(high - low, 1e-3)
    stretch = ramp.clamp(0.0, 1.0)
    frequencies = inv_freq * ((1 - stretch) + stretch / factor)

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    attention = scaling.get("attention_factor")
    if attention is None:
        mscale, all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
        attention = magnitude(mscale) / magnitude(all_dim) if mscale and all_dim else magnitude(1.0)
    return frequencies, float(attention)
