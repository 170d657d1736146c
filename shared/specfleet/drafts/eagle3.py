"""EAGLE-3 (arXiv 2503.01840): one decoder layer over fused target states, trained on its own features.

Shapes: B batch, T padded length, R rows, H hidden size, K captured layers, V / V_d target and draft vocabulary.
Conventions: row t reads aux states of token t and the *next* token x_{t+1}, and guesses x_{t+2}. At rollout step i the row's
feature is its own output of step i−1, its token x_{t+1+i}, its rotary position t+i, and it guesses x_{t+2+i}.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Self

import torch
from torch import nn
from torch.nn import functional

from specfleet.contracts.errors import ConfigError
from specfleet.drafts.base import Draft, Drafter
from specfleet.drafts.layers import GroupedQueryProjections, RMSNorm, Rope, Rotation, SwiGLU
from specfleet.drafts.ttt_attention import ttt_attention


@dataclass(frozen=True)
class Eagle3Config:
    """Sizes of an EAGLE-3 draft. layer_ids: captured layers as "output of layer k"."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    layer_ids: tuple[int, ...]
    max_position_embeddings: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    fc_norm: bool = False
    """EAGLE-3.1: a norm on each captured layer's chunk before the fusion."""
    norm_output: bool = False
    """EAGLE-3.1: feed the normed output back. Logits are normed either way."""

    @property
    def num_aux(self) -> int:
        return len(self.layer_ids)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "layer_ids": list(self.layer_ids)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Raises ConfigError SF-DRAFT-CONFIG on unknown or missing keys and on sizes that contradict one another."""
        known = {field.name for field in fields(cls)}
        try:
            config = cls(**{**values, "layer_ids": tuple(values["layer_ids"])})
        except (TypeError, KeyError) as error:
            unknown = sorted(set(values) - known)
            raise ConfigError("SF-DRAFT-CONFIG", f"eagle3 draft config does not fit: {error}; unknown keys {unknown}") from error
        if config.num_attention_heads % config.num_key_value_heads:
            raise ConfigError(
                "SF-DRAFT-CONFIG",
                f"num_attention_heads ({config.num_attention_heads}) must be a multiple of num_key_value_heads "
                f"({config.num_key_value_heads})",
            )
        if not 0 < config.draft_vocab_size <= config.vocab_size:
            raise ConfigError(
                "SF-DRAFT-CONFIG",
                f"draft_vocab_size ({config.draft_vocab_size}) must lie between 1 and vocab_size ({config.vocab_size})",
            )
        return config


class Eagle3Layer(nn.Module):
    """A pre-norm decoder layer whose attention reads [normed embedding, normed feature] and whose residual is the raw feature."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps)
        self.hidden_norm = RMSNorm(size, eps)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.self_attn = GroupedQueryProjections(
            2 * size, size, config.num_attention_heads, config.num_key_value_heads, config.head_dim
        )
        self.mlp = SwiGLU(size, config.intermediate_size)

    def attention_input(self, embedding_RH: torch.Tensor, feature_RH: torch.Tensor) -> torch.Tensor:
        return torch.cat((self.input_layernorm(embedding_RH), self.hidden_norm(feature_RH)), dim=-1)

    def finish(self, feature_RH: torch.Tensor, attended_RNd: torch.Tensor) -> torch.Tensor:
        hidden = feature_RH + self.self_attn.o_proj(attended_RNd.flatten(1))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Eagle3Draft(Draft):
    """Module names are the exported (SGLang) names. d2t: offsets, target id of draft id j is j + d2t[j]."""

    kind: ClassVar[str] = "eagle3"
    d2t: torch.Tensor
    t2d: torch.Tensor

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config = config
        aux_size = config.num_aux * config.target_hidden_size
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(config.target_hidden_size, config.rms_norm_eps) for _ in config.layer_ids)
        self.fc = nn.Linear(aux_size, config.hidden_size, bias=False)
        self.midlayer = Eagle3Layer(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.arange(config.vocab_size) < config.draft_vocab_size)
        self.rope = Rope(config.head_dim, config.rope_theta, config.rope_scaling, config.max_position_embeddings)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        return cls(Eagle3Config.from_dict(config))

    def set_vocabulary(self, d2t: torch.Tensor, t2d: torch.Tensor) -> None:
        """Installs a vocabulary map. Raises ConfigError SF-DRAFT-VOCAB when the two halves disagree."""
        chosen = t2d.nonzero().flatten()
        if d2t.shape != self.d2t.shape or t2d.shape != self.t2d.shape or not torch.equal(
            chosen, d2t + torch.arange(len(d2t), device=d2t.device)
        ):
            raise ConfigError(
                "SF-DRAFT-VOCAB",
                f"vocabulary map does not fit: d2t {list(d2t.shape)} (expected {list(self.d2t.shape)}), t2d {list(t2d.shape)} "
                f"with {len(chosen)} entries set (expected {list(self.t2d.shape)} with {len(self.d2t)})",
            )
        self.d2t.copy_(d2t)
        self.t2d.copy_(t2d)

    def target_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        return draft_ids + self.d2t[draft_ids]

    def features(self, aux: torch.Tensor) -> torch.Tensor:
        """[…, K·H_T] → [..., H]: the feature of rollout step 0."""
        if self.config.fc_norm:
            chunks = aux.chunk(self.config.num_aux, dim=-1)
            aux = torch.cat([norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], dim=-1)
        return self.fc(aux)

    def feedback(self, output_RH: torch.Tensor) -> torch.Tensor:
        return self.norm(output_RH) if self.config.norm_output else output_RH

    def logits(self, output_RH: torch.Tensor) -> torch.Tensor:
        """Layer outputs [R, H] → draft-vocabulary logits [R, V_d]."""
        return self.lm_head(self.norm(output_RH))

    def rollout(
        self,
        input_ids_BT: torch.Tensor,
        aux_BTK: torch.Tensor,
        embedding_VH: torch.Tensor,
        active: Sequence[torch.Tensor],
    ) -> list[torch.Tensor]:
        """Teacher-forced tokens, self-generated features: layer outputs [A_i, H] of step i = 0 … len(active)−1.

        active[i]: flat rows b·T + t that step i computes, ascending, each also in active[i−1], with t + 1 + i < T.
        Rows outside active[0] still provide step-0 keys and values. Gradients flow through all steps.
        """
        batch, length = input_ids_BT.shape
        attention = self.midlayer.self_attn
        dtype = self.fc.weight.dtype
        flat_ids = input_ids_BT.flatten()
        positions = torch.arange(length, device=flat_ids.device).repeat(batch)
        next_ids = functional.pad(input_ids_BT[:, 1:], (0, 1)).flatten()

        feature = self.features(aux_BTK.flatten(0, 1).to(dtype))
        mixed = self.midlayer.attention_input(functional.embedding(next_ids, embedding_VH).to(dtype), feature)
        rotation = self.rope.at(positions, dtype)
        keys, values = attention.keys_values(mixed, rotation)
        prefix_k, prefix_v = (self._per_query_head(x.unflatten(0, (batch, length))) for x in (keys, values))

        rows = active[0]
        feature, mixed, rotation = feature[rows], mixed[rows], rotation.rows(rows)
        step_keys: list[torch.Tensor] = []
        step_values: list[torch.Tensor] = []
        outputs = []
        for step in range(len(active)):
            if step:
                inside = torch.searchsorted(rows, active[step])
                rows = active[step]
                feature = self.feedback(outputs[-1][inside])
                step_keys, step_values = [k[inside] for k in step_keys], [v[inside] for v in step_values]
                embedded = functional.embedding(flat_ids[rows + 1 + step], embedding_VH).to(dtype)
                mixed = self.midlayer.attention_input(embedded, feature)
                rotation = self.rope.at(positions[rows] + step, dtype)
                keys, values = attention.keys_values(mixed, rotation)
                step_keys.append(keys)
                step_values.append(values)
            queries = attention.queries(mixed, rotation)
            attended = ttt_attention(queries, prefix_k, prefix_v, rows, step_keys, step_values)
            outputs.append(self.midlayer.finish(feature, attended))
        return outputs

    def _per_query_head(self, x_BTNd: torch.Tensor) -> torch.Tensor:
        """[B, T, n_kv, d] → [B, n_q, T, d]."""
        groups = self.config.num_attention_heads // self.config.num_key_value_heads
        return x_BTNd.transpose(1, 2).repeat_interleave(groups, dim=1)

    def drafter(self, embedding_VH: torch.Tensor) -> "Eagle3Drafter":
        return Eagle3Drafter(self, embedding_VH)

    @torch.no_grad()
    def chain_hits(
        self, input_ids_BT: torch.Tensor, aux_BTK: torch.Tensor, embedding_VH: torch.Tensor, k: int
    ) -> torch.Tensor:
        batch, length = input_ids_BT.shape
        hits = torch.zeros(batch * length, k, dtype=torch.bool, device=input_ids_BT.device)
        flat_ids = input_ids_BT.flatten()
        positions = torch.arange(batch * length, device=flat_ids.device)
        # Step i of row t is judged by x_{t+2+i}, which must lie inside the sequence.
        active = [positions[positions % length + 2 + step < length] for step in range(min(k, length - 2))]
        if not active:
            return hits.view(batch, length, k)
        for step, output in enumerate(self.rollout(input_ids_BT, aux_BTK, embedding_VH, active)):
            guesses = self.target_ids(self.logits(output).argmax(-1))
            hits[active[step], step] = guesses == flat_ids[active[step] + 2 + step]
        return hits.view(batch, length, k).cummin(-1).values


class Eagle3Drafter(Drafter):
    """Chain drafting with a key-value cache. Guesses live behind the verified rows and are dropped by the next `extend`."""

    def __init__(self, draft: Eagle3Draft, embedding_VH: torch.Tensor) -> None:
        self._draft = draft
        self._embedding = embedding_VH
        self._length = 0
        config, weight = draft.config, draft.fc.weight
        shape = (config.num_key_value_heads, 256, config.head_dim)
        self._keys = torch.empty(shape, dtype=weight.dtype, device=weight.device)
        self._values = torch.empty_like(self._keys)
        self._output = torch.empty(1, config.hidden_size, dtype=weight.dtype, device=weight.device)

    @torch.no_grad()
    def extend(self, next_ids: Sequence[int], aux_TKH: torch.Tensor) -> None:
        weight = self._draft.fc.weight
        feature = self._draft.features(aux_TKH.to(weight.device, weight.dtype))
        self._output = self._forward(next_ids, feature, self._length)[-1:]
        self._length += len(next_ids)

    def propose(self, k: int) -> list[int]:
        return self.chain(k)[0]

    @torch.no_grad()
    def chain(self, k: int, forced: Sequence[int] | None = None) -> tuple[list[int], list[torch.Tensor]]:
        """k greedy guesses and the logits [V_d] behind each. forced: tokens fed back in place of the guesses (tests)."""
        guesses: list[int] = []
        logits: list[torch.Tensor] = []
        output = self._output
        for step in range(k):
            if step:
                token = guesses[-1] if forced is None else forced[step - 1]
                output = self._forward([token], self._draft.feedback(output), self._length + step - 1)
            logits.append(self._draft.logits(output)[0])
            guesses.append(int(self._draft.target_ids(logits[-1].argmax())))
        return guesses, logits

    def _forward(self, ids: Sequence[int], feature_RH: torch.Tensor, start: int) -> torch.Tensor:
        """Rows at positions start, start+1, … that see everything cached before them and one another causally."""
        layer, attention = self._draft.midlayer, self._draft.midlayer.self_attn
        end = start + len(ids)
        self._reserve(end)
        device, dtype = feature_RH.device, feature_RH.dtype
        embedded = functional.embedding(torch.tensor(ids, device=self._embedding.device), self._embedding)
        mixed = layer.attention_input(embedded.to(device, dtype), feature_RH)
        rotation: Rotation = self._draft.rope.at(torch.arange(start, end, device=device), dtype)
        keys, values = attention.keys_values(mixed, rotation)
        self._keys[:, start:end] = keys.transpose(0, 1)
        self._values[:, start:end] = values.transpose(0, 1)
        queries = attention.queries(mixed, rotation).transpose(0, 1)
        mask = None
        if len(ids) > 1:
            mask = torch.arange(end, device=device) <= torch.arange(start, end, device=device)[:, None]
        attended = functional.scaled_dot_product_attention(
            queries[None], self._keys[None, :, :end], self._values[None, :, :end], attn_mask=mask, enable_gqa=True
        )[0]
        return layer.finish(feature_RH, attended.transpose(0, 1))

    def _reserve(self, length: int) -> None:
        capacity = self._keys.shape[1]
        if length > capacity:
            grow = max(length, 2 * capacity) - capacity
            self._keys = functional.pad(self._keys, (0, 0, 0, grow))
            self._values = functional.pad(self._values, (0, 0, 0, grow))
