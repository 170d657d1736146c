"""P-EAGLE: an EAGLE-3 draft that proposes all its tokens in one forward pass.

Shapes: B batch, T padded length, R rows, H hidden size, K captured layers, V / V_d target and draft vocabulary, D depths.
An element (a, d) is depth d of the pass anchored at row a: it stands at rotary position a + d and guesses x_{a+2+d}. Depth 0
reads the target state of row a and the token x_{a+1}; deeper elements read a mask token and one learned placeholder state, so
all they know comes through attention: depth 0 of rows 0 … a, and their own chain (a, 1) … (a, d).
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import nn
from torch.nn import functional

from specfleet.drafts.base import Drafter, Pick, likeliest
from specfleet.drafts.eagle_base import EagleDraft, EagleLayer, EagleSizes
from specfleet.drafts.kv_cache import KeyValueCache
from specfleet.drafts.layers import DecoderLayer, GroupedQueryProjections, RMSNorm, Rotation, SwiGLU
from specfleet.drafts.ttt_attention import ttt_attention


@dataclass(frozen=True, kw_only=True)
class PEagleConfig(EagleSizes):
    num_layers: int
    num_depths: int
    """Tokens guessed in one pass."""
    mask_token_id: int
    """The token placeholder elements read; serving must use the same one."""
    norm_before_residual: bool = False

    def problems(self) -> list[str]:
        found = super().problems()
        if self.num_layers < 1 or self.num_depths < 1:
            found.append(f"num_layers ({self.num_layers}) and num_depths ({self.num_depths}) must be at least 1")
        if not 0 <= self.mask_token_id < self.vocab_size:
            found.append(f"mask_token_id ({self.mask_token_id}) must be one of the {self.vocab_size} target ids")
        return found


class PEagleDraft(EagleDraft):
    """Module names are the exported (vLLM) names. The embedding is the draft's own: it starts as the target's and is trained."""

    kind: ClassVar[str] = "peagle"
    config: PEagleConfig

    def __init__(self, config: PEagleConfig) -> None:
        super().__init__()
        self.config = config
        aux_size = config.num_aux * config.target_hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.fc = nn.Linear(aux_size, config.hidden_size, bias=False)
        self.mask_hidden = nn.Parameter(torch.randn(1, 1, aux_size))
        first = EagleLayer(config, _mlp(config), norm_before_residual=config.norm_before_residual)
        self.layers = nn.ModuleList([first, *(_layer(config) for _ in range(config.num_layers - 1))])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self._add_vocabulary(saved=True)
        self._initialise()

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        return cls(PEagleConfig.from_dict(config))

    @property
    def max_draft_tokens(self) -> int | None:
        return self.config.num_depths

    def logits(self, output_RH: torch.Tensor) -> torch.Tensor:
        """Outputs of the last layer [R, H] → draft-vocabulary logits [R, V_d]."""
        return self.lm_head(self.norm(output_RH))

    def read(self, ids_R: torch.Tensor, aux_RK: torch.Tensor, masks: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Embeddings and features [R + masks, H] of R real rows followed by placeholders."""
        mask_id = torch.full((masks,), self.config.mask_token_id, device=ids_R.device)
        embedded = self.embed_tokens(torch.cat((ids_R, mask_id)))
        placeholder = self.fc(self.mask_hidden[0]).expand(masks, -1)
        return embedded, torch.cat((self.fc(aux_RK.to(self.fc.weight)), placeholder))

    def mixed(self, index: int, embedded_RH: torch.Tensor, hidden_RH: torch.Tensor) -> torch.Tensor:
        """What the attention of layer `index` projects."""
        layer = self.layers[index]
        return layer.input_layernorm(hidden_RH) if index else layer.attention_input(embedded_RH, hidden_RH)

    def elements(
        self, input_ids_BT: torch.Tensor, aux_BTK: torch.Tensor, chains: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Last-layer outputs [R_d, H] of the elements (a, d), per depth.

        chains[d]: flat rows b·T + a, ascending; chains[0] those whose output is wanted (every row takes part at depth 0),
        chains[d + 1] for d ≥ 1 within chains[d]. Deeper chains than num_depths are the caller's mistake.
        """
        batch, length = input_ids_BT.shape
        count, dtype = batch * length, self.fc.weight.dtype
        deep = list(chains[1:])
        while deep and not len(deep[-1]):
            deep.pop()
        next_ids = functional.pad(input_ids_BT[:, 1:], (0, 1)).flatten()
        embedded, hidden = self.read(next_ids, aux_BTK.flatten(0, 1), sum(map(len, deep)))
        positions = torch.arange(length, device=next_ids.device).repeat(batch)
        rotation = self.rope.at(
            torch.cat([positions, *(positions[rows] + depth for depth, rows in enumerate(deep, 1))]), dtype
        )
        sizes = [count, *map(len, deep)]
        # chain[d]: where the elements of depths 1 … d + 1 stand that make up each chain of depth d + 1, [d + 1, R_{d+1}].
        first = list(itertools.accumulate(sizes))
        chain = [
            torch.stack([first[j] + torch.searchsorted(deep[j], rows) for j in range(d + 1)])
            for d, rows in enumerate(deep)
        ]
        every = torch.arange(count, device=next_ids.device)
        for index, layer in enumerate(self.layers):
            mixed = self.mixed(index, embedded, hidden)
            keys, values = layer.self_attn.keys_values(mixed, rotation)
            wanted = every
            if index == len(self.layers) - 1:  # nothing reads the other rows of depth 0 any more
                wanted = chains[0]
                kept = torch.cat((wanted, torch.arange(count, len(hidden), device=wanted.device)))
                # index_select rather than [kept]: its gradient is one kernel, without sorting the rows first.
                mixed, hidden = mixed.index_select(0, kept), hidden.index_select(0, kept)
                rotation = rotation.rows(kept)
                sizes = [len(wanted), *sizes[1:]]
            queries = layer.self_attn.queries(mixed, rotation)
            attended = self._attend(queries.split(sizes), torch.stack((keys, values)), batch, wanted, deep, chain)
            hidden = layer.finish(hidden, attended)
        outputs = list(hidden.split(sizes))
        return outputs + [hidden[:0]] * (len(chains) - len(outputs))

    def _attend(
        self, queries: Sequence[torch.Tensor], keys_values: torch.Tensor, batch: int, wanted: torch.Tensor,
        deep: Sequence[torch.Tensor], chain: Sequence[torch.Tensor],
    ) -> torch.Tensor:  # fmt: skip
        """Depth 0 is ordinary causal attention; a deeper element adds its chain, as a rollout step does (ttt_attention)."""
        count = keys_values.shape[1] - sum(map(len, deep))
        prefix_k, prefix_v = (self._per_query_head(part, batch) for part in keys_values[:, :count])
        attended = [ttt_attention(queries[0], prefix_k, prefix_v, wanted)]
        for depth, rows in enumerate(deep):
            own = keys_values.index_select(1, chain[depth].flatten()).unflatten(1, chain[depth].shape)
            attended.append(ttt_attention(queries[depth + 1], prefix_k, prefix_v, rows, own))
        return torch.cat(attended)

    def drafter(self, embedding_VH: torch.Tensor, head_VH: torch.Tensor | None = None) -> "PEagleDrafter":
        """Reads neither argument: embedding and head are the draft's own."""
        return PEagleDrafter(self)

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
        flat_ids = input_ids_BT.flatten()
        hits = torch.zeros(batch * length, k, dtype=torch.bool, device=flat_ids.device)
        rows = torch.arange(batch * length, device=flat_ids.device)
        if wanted_BT is not None:
            rows = rows[wanted_BT.flatten()]
        # Depth d of row a is judged by x_{a+2+d}, which must lie inside the sequence.
        depths = min(k, self.config.num_depths, max(length - 2, 0))
        chains = [rows[rows % length + 2 + depth < length] for depth in range(depths)]
        if not chains:
            return hits.view(batch, length, k)
        for depth, output in enumerate(self.elements(input_ids_BT, aux_BTK, chains)):
            guesses = self.target_ids(self.logits(output).argmax(-1))
            hits[chains[depth], depth] = guesses == flat_ids[chains[depth] + 2 + depth]
        return hits.view(batch, length, k).cummin(-1).values


def _layer(config: PEagleConfig) -> DecoderLayer:
    """An ordinary layer, behind the first."""
    size = config.hidden_size
    attention = GroupedQueryProjections(
        size, size, config.num_attention_heads, config.num_key_value_heads, config.head_dim
    )
    return DecoderLayer(size, config.rms_norm_eps, attention, _mlp(config))


def _mlp(config: PEagleConfig) -> SwiGLU:
    return SwiGLU(config.hidden_size, config.intermediate_size)


class PEagleDrafter(Drafter):
    """One forward per round: rows verified since the last one, then a placeholder row per further guess.

    Placeholders' keys and values lie behind the verified rows and are overwritten in the next round.
    """

    def __init__(self, draft: PEagleDraft) -> None:
        self._draft = draft
        config = draft.config
        self._caches = [
            KeyValueCache(config.num_key_value_heads, config.head_dim, draft.fc.weight) for _ in draft.layers
        ]
        self._length = 0
        self._ids: list[int] = []
        self._aux: list[torch.Tensor] = []
        self._first = torch.zeros(config.draft_vocab_size)

    def extend(self, next_ids: Sequence[int], aux_TKH: torch.Tensor) -> None:
        # Kept until guesses are wanted, so that both run in one pass.
        self._ids += next_ids
        self._aux.append(aux_TKH)

    def propose(self, k: int, pick: Pick = likeliest) -> list[int]:
        return [int(pick(self._draft.target_logits(row))) for row in self.chain(k)]

    @torch.no_grad()
    def chain(self, k: int) -> list[torch.Tensor]:
        """The logits [V_d] behind each guess, at most num_depths of them."""
        draft, new = self._draft, len(self._ids)
        masks = min(k, draft.config.num_depths) - 1
        if masks < 0:
            return []
        weight = draft.fc.weight
        aux = torch.cat(self._aux) if self._aux else weight.new_zeros(0, weight.shape[1])
        ids = torch.tensor(self._ids, dtype=torch.int64, device=weight.device)
        embedded, hidden = draft.read(ids, aux.to(weight), masks)
        start = self._length
        rotation: Rotation = draft.rope.at(torch.arange(start, start + len(hidden), device=weight.device), weight.dtype)
        for index, (layer, cache) in enumerate(zip(draft.layers, self._caches, strict=True)):
            mixed = draft.mixed(index, embedded, hidden)
            keys, values = layer.self_attn.keys_values(mixed, rotation)
            queries = layer.self_attn.queries(mixed, rotation)
            hidden = layer.finish(hidden, cache.attend(queries, keys, values, start))
        if new:
            self._first = draft.logits(hidden[new - 1 : new])[0]
            self._length, self._ids, self._aux = start + new, [], []
        return [self._first, *draft.logits(hidden[new:])]
