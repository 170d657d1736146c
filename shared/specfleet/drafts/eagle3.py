"""EAGLE-3 (arXiv 2503.01840): one decoder layer over fused target states, trained on its own features.

Shapes: B batch, T padded length, R rows, H hidden size, K captured layers, V / V_d target and draft vocabulary.
Conventions: row t reads aux states of token t and the *next* token x_{t+1}, and guesses x_{t+2}. At rollout step i the row's
feature is its own output of step i−1, its token x_{t+1+i}, its rotary position t+i, and it guesses x_{t+2+i}.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import nn
from torch.nn import functional

from specfleet.contracts.errors import ConfigError
from specfleet.drafts.base import Drafter, Pick, likeliest
from specfleet.drafts.eagle_base import EagleDraft, EagleLayer, EagleSizes
from specfleet.drafts.kv_cache import KeyValueCache
from specfleet.drafts.layers import ExpertMLP, RMSNorm, Rotation, SwiGLU
from specfleet.drafts.ttt_attention import ttt_attention


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(EagleSizes):
    fc_norm: bool = False
    """EAGLE-3.1: a norm on each captured layer's chunk before the fusion."""
    norm_output: bool = False
    """EAGLE-3.1: feed the normed output back. Logits are normed either way."""
    legacy_v030: bool = False
    """Only for parity tests. SpecForge v0.3.0 never fed the normed output back, and let norm_output decide about the logits."""
    own_head: bool = True
    """False: the target's output head, frozen, and the target's whole vocabulary."""
    experts: int = 0
    """Experimental: experts in the MLP; 0: dense."""
    experts_per_token: int = 2

    def problems(self) -> list[str]:
        found = super().problems()
        if not self.own_head and (
            self.draft_vocab_size < self.vocab_size or self.target_hidden_size != self.hidden_size
        ):
            found.append(
                f"a draft with the target's head needs its vocabulary and width: draft_vocab_size {self.draft_vocab_size} and "
                f"hidden_size {self.hidden_size}, the target has {self.vocab_size} and {self.target_hidden_size}"
            )
        return found


class Eagle3Draft(EagleDraft):
    """Module names are the exported (SGLang) names."""

    kind: ClassVar[str] = "eagle3"
    config: Eagle3Config

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config = config
        aux_size = config.num_aux * config.target_hidden_size
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(
                RMSNorm(config.target_hidden_size, config.rms_norm_eps) for _ in config.layer_ids
            )
        self.fc = nn.Linear(aux_size, config.hidden_size, bias=False)
        self.midlayer = EagleLayer(config, _mlp(config))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if config.own_head:
            self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        # With the target's head the map is the identity, which nobody needs to be told.
        self._add_vocabulary(saved=config.own_head)
        self._initialise()

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        return cls(Eagle3Config.from_dict(config))

    def features(self, aux: torch.Tensor) -> torch.Tensor:
        """[…, K·H_T] → [..., H]: the feature of rollout step 0."""
        if self.config.fc_norm:
            chunks = aux.chunk(self.config.num_aux, dim=-1)
            aux = torch.cat([norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], dim=-1)
        return self.fc(aux)

    def feedback(self, output_RH: torch.Tensor) -> torch.Tensor:
        """Layer output of one step → feature of the next."""
        return self.norm(output_RH) if self.config.norm_output and not self.config.legacy_v030 else output_RH

    def head_input(self, output_RH: torch.Tensor) -> torch.Tensor:
        """Layer output → what the head multiplies."""
        return output_RH if self.config.legacy_v030 and not self.config.norm_output else self.norm(output_RH)

    def head(self, head_VH: torch.Tensor | None = None) -> torch.Tensor:
        """The output head [V_d, H]: the draft's own, or the target's, which must be given then (else SF-DRAFT-HEAD)."""
        if self.config.own_head:
            return self.lm_head.weight
        if head_VH is None:
            raise ConfigError("SF-DRAFT-HEAD", "this draft uses the target's output head: pass head_VH [V, H]")
        # Rows beyond the vocabulary are padding of the target's checkpoint.
        return head_VH[: self.config.vocab_size]

    def logits(self, output_RH: torch.Tensor, head_VH: torch.Tensor | None = None) -> torch.Tensor:
        """Layer outputs [R, H] → draft-vocabulary logits [R, V_d]."""
        return functional.linear(self.head_input(output_RH), self.head(head_VH).to(output_RH))

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
        prefix_k, prefix_v = self._per_query_head(keys, batch), self._per_query_head(values, batch)

        # index_select rather than [rows]: its gradient is one kernel, without sorting the rows first.
        rows = active[0]
        feature, mixed = feature.index_select(0, rows), mixed.index_select(0, rows)
        rotation = rotation.rows(rows)
        own: torch.Tensor | None = None
        outputs: list[torch.Tensor] = []
        for step in range(len(active)):
            if step:
                inside = torch.searchsorted(rows, active[step])
                rows = active[step]
                feature = self.feedback(outputs[-1].index_select(0, inside))
                embedded = functional.embedding(flat_ids[rows + 1 + step], embedding_VH).to(dtype)
                mixed = self.midlayer.attention_input(embedded, feature)
                rotation = self.rope.at(positions[rows] + step, dtype)
                made = torch.stack(attention.keys_values(mixed, rotation))[:, None]
                own = made if own is None else torch.cat((own.index_select(2, inside), made), dim=1)
            queries = attention.queries(mixed, rotation)
            attended = ttt_attention(queries, prefix_k, prefix_v, rows, own)
            outputs.append(self.midlayer.finish(feature, attended))
        return outputs

    def drafter(self, embedding_VH: torch.Tensor, head_VH: torch.Tensor | None = None) -> "Eagle3Drafter":
        return Eagle3Drafter(self, embedding_VH, head_VH)

    @torch.no_grad()
    def chain_hits(
        self,
        input_ids_BT: torch.Tensor,
        aux_BTK: torch.Tensor,
        embedding_VH: torch.Tensor,
        k: int,
        head_VH: torch.Tensor | None = None,
        wanted_BT: torch.Tensor | None = None,
    ) -> torch.Tensor:
        batch, length = input_ids_BT.shape
        hits = torch.zeros(batch * length, k, dtype=torch.bool, device=input_ids_BT.device)
        flat_ids = input_ids_BT.flatten()
        positions = torch.arange(batch * length, device=flat_ids.device)
        if wanted_BT is not None:
            positions = positions[wanted_BT.flatten()]
        # Step i of row t is judged by x_{t+2+i}, which must lie inside the sequence.
        active = [positions[positions % length + 2 + step < length] for step in range(min(k, length - 2))]
        if not active:
            return hits.view(batch, length, k)
        for step, output in enumerate(self.rollout(input_ids_BT, aux_BTK, embedding_VH, active)):
            guesses = self.target_ids(self.logits(output, head_VH).argmax(-1))
            hits[active[step], step] = guesses == flat_ids[active[step] + 2 + step]
        return hits.view(batch, length, k).cummin(-1).values


def _mlp(config: Eagle3Config) -> nn.Module:
    if config.experts:
        return ExpertMLP(config.hidden_size, config.intermediate_size, config.experts, config.experts_per_token)
    return SwiGLU(config.hidden_size, config.intermediate_size)


class Eagle3Drafter(Drafter):
    """Chain drafting with a key-value cache. Guesses live behind the verified rows and are dropped by the next `extend`."""

    def __init__(self, draft: Eagle3Draft, embedding_VH: torch.Tensor, head_VH: torch.Tensor | None = None) -> None:
        self._draft = draft
        self._embedding = embedding_VH
        self._head = draft.head(head_VH)
        self._length = 0
        config = draft.config
        self._cache = KeyValueCache(config.num_key_value_heads, config.head_dim, draft.fc.weight)
        self._output = draft.fc.weight.new_empty(1, config.hidden_size)

    @torch.no_grad()
    def extend(self, next_ids: Sequence[int], aux_TKH: torch.Tensor) -> None:
        weight = self._draft.fc.weight
        feature = self._draft.features(aux_TKH.to(weight.device, weight.dtype))
        self._output = self._forward(next_ids, feature, self._length)[-1:]
        self._length += len(next_ids)

    def propose(self, k: int, pick: Pick = likeliest) -> list[int]:
        return self.chain(k, pick)[0]

    @torch.no_grad()
    def chain(
        self, k: int, pick: Pick = likeliest, forced: Sequence[int] | None = None
    ) -> tuple[list[int], list[torch.Tensor]]:
        """k guesses and the logits [V_d] behind each. forced: tokens fed back in place of the guesses (tests)."""
        guesses: list[int] = []
        logits: list[torch.Tensor] = []
        output = self._output
        for step in range(k):
            if step:
                token = guesses[-1] if forced is None else forced[step - 1]
                output = self._forward([token], self._draft.feedback(output), self._length + step - 1)
            logits.append(self._draft.logits(output, self._head)[0])
            guesses.append(int(pick(self._draft.target_logits(logits[-1]))))
        return guesses, logits

    def _forward(self, ids: Sequence[int], feature_RH: torch.Tensor, start: int) -> torch.Tensor:
        """Rows at positions start, start+1, … that see everything cached before them and one another causally."""
        layer, attention = self._draft.midlayer, self._draft.midlayer.self_attn
        device, dtype = feature_RH.device, feature_RH.dtype
        embedded = functional.embedding(torch.tensor(ids, device=self._embedding.device), self._embedding)
        mixed = layer.attention_input(embedded.to(device, dtype), feature_RH)
        rotation: Rotation = self._draft.rope.at(torch.arange(start, start + len(ids), device=device), dtype)
        keys, values = attention.keys_values(mixed, rotation)
        return layer.finish(feature_RH, self._cache.attend(attention.queries(mixed, rotation), keys, values, start))
