"""The backbone of block drafts (DFlash, arXiv 2602.06036, and its descendants): one pass guesses a whole block of tokens.

A block is an anchor token followed by mask tokens. Its slots attend to the target's states before the anchor, which enter
every layer as extra keys and values, and to one another. Embedding and output head are the target's, frozen.

Shapes: N blocks of G slots, S context rows, H hidden size, K captured layers, V target vocabulary, D draft layers.
Slot j stands at position a + j. It predicts the token at its own position (slot 0, the anchor, predicts nothing), or with
`sample_from_anchor` the token after it.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from specfleet.contracts.errors import ConfigError
from specfleet.drafts.base import Draft, Drafter, Pick, likeliest
from specfleet.drafts.block_attention import block_attention
from specfleet.drafts.config import DraftConfig
from specfleet.drafts.layers import DecoderLayer, GroupedQueryProjections, RMSNorm, Rope, Rotation, SwiGLU


@dataclass(frozen=True, kw_only=True)
class BlockConfig(DraftConfig):
    """sliding_window: counts the slot itself."""

    num_layers: int
    block_size: int
    mask_token_id: int
    num_target_layers: int
    layer_types: tuple[str, ...] = ()
    """Per layer "full_attention" or "sliding_attention"; empty: all full."""
    sliding_window: int = 0
    sample_from_anchor: bool = False
    rms_norm_eps: float = 1e-6

    @property
    def first_slot(self) -> int:
        """The first slot that predicts."""
        return 0 if self.sample_from_anchor else 1

    @property
    def num_guesses(self) -> int:
        """Tokens one block proposes."""
        return self.block_size - self.first_slot

    def window_of(self, layer: int) -> int | None:
        sliding = bool(self.layer_types) and self.layer_types[layer] == "sliding_attention"
        return self.sliding_window if sliding else None

    def problems(self) -> list[str]:
        found = super().problems()
        if self.block_size < 2:
            found.append(f"block_size ({self.block_size}) must be at least 2")
        if not 0 <= self.mask_token_id < self.vocab_size:
            found.append(f"mask_token_id ({self.mask_token_id}) must lie below vocab_size ({self.vocab_size})")
        if self.layer_types and (
            len(self.layer_types) != self.num_layers
            or not set(self.layer_types) <= {"full_attention", "sliding_attention"}
        ):
            found.append(
                f"layer_types {list(self.layer_types)} must name full_attention or sliding_attention for each of "
                f"{self.num_layers} layers"
            )
        if "sliding_attention" in self.layer_types and self.sliding_window < self.block_size:
            found.append(
                f"sliding_window ({self.sliding_window}) must be at least block_size ({self.block_size}): engines would trim "
                "the block itself"
            )
        return found


class NormedAttention(GroupedQueryProjections):
    """Projections with an RMS norm on each query and key head, as in Qwen3. Slots and context share them."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__(
            config.hidden_size,
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def queries(self, x_RD: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        return rotation.apply(self.q_norm(self.q_proj(x_RD).unflatten(-1, (-1, self.head_dim))))

    def keys_values(self, x_RD: torch.Tensor, rotation: Rotation) -> tuple[torch.Tensor, torch.Tensor]:
        keys = rotation.apply(self.k_norm(self.k_proj(x_RD).unflatten(-1, (-1, self.head_dim))))
        return keys, self.v_proj(x_RD).unflatten(-1, (-1, self.head_dim))


def _layer(config: BlockConfig) -> DecoderLayer:
    """Attention is over slots; the context's keys and values come from outside."""
    size = config.hidden_size
    return DecoderLayer(size, config.rms_norm_eps, NormedAttention(config), SwiGLU(size, config.intermediate_size))


class BlockDraft(Draft):
    """The backbone. Module names are the exported names; subclasses add heads and say how a block is turned into guesses."""

    config: BlockConfig

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(len(config.layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(_layer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rope = Rope(config.head_dim, config.rope_theta, config.rope_scaling, config.max_position_embeddings)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)

    @abstractmethod
    def guess(
        self,
        hidden_NGH: torch.Tensor,
        anchor_ids_N: torch.Tensor,
        embedding_VH: torch.Tensor,
        head_VH: torch.Tensor,
        k: int,
        pick: Pick = likeliest,
    ) -> torch.Tensor:
        """Guesses [N, min(k, num_guesses)] for the tokens after each anchor, from the backbone's output."""

    @property
    def max_draft_tokens(self) -> int:
        return self.config.num_guesses

    def context(self, aux_SK: torch.Tensor, positions_S: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Target states [S, K·H] → per layer the context's keys (rotated) and values, [S, n_kv, d] each."""
        dtype = self.fc.weight.dtype
        feature = self.hidden_norm(self.fc(aux_SK.to(dtype)))
        rotation = self.rope.at(positions_S, dtype)
        return [layer.self_attn.keys_values(feature, rotation) for layer in self.layers]

    def blocks(
        self,
        context: Sequence[tuple[torch.Tensor, torch.Tensor]],
        anchors_N: torch.Tensor,
        anchor_ids_N: torch.Tensor,
        starts_N: torch.Tensor,
        embedding_VH: torch.Tensor,
    ) -> torch.Tensor:
        """Normed outputs [N, G, H] of N blocks, the tensor that enters the target's head.

        anchors_N, anchor_ids_N: position and token of each anchor, blocks of one sequence together and ascending.
        starts_N: the context row where each block's sequence begins.
        """
        count, slots = len(anchors_N), self.config.block_size
        dtype = self.fc.weight.dtype
        ids_NG = anchor_ids_N[:, None].repeat(1, slots)
        ids_NG[:, 1:] = self.config.mask_token_id
        hidden = functional.embedding(ids_NG.flatten(), embedding_VH).to(dtype)
        positions = (anchors_N[:, None] + torch.arange(slots, device=anchors_N.device)).flatten()
        rotation = self.rope.at(positions, dtype)
        for index, layer in enumerate(self.layers):
            normed = layer.input_layernorm(hidden)
            keys, values = layer.self_attn.keys_values(normed, rotation)
            attended = block_attention(
                layer.self_attn.queries(normed, rotation).unflatten(0, (count, slots)),
                *context[index],
                keys.unflatten(0, (count, slots)),
                values.unflatten(0, (count, slots)),
                anchors_N,
                starts_N,
                self.config.window_of(index),
            )
            hidden = layer.finish(hidden, attended.flatten(0, 1))
        return self.norm(hidden).unflatten(0, (count, slots))

    def drafter(self, embedding_VH: torch.Tensor, head_VH: torch.Tensor | None = None) -> "BlockDrafter":
        return BlockDrafter(self, embedding_VH, self._need_head(head_VH))

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
        head_VH = self._need_head(head_VH)
        batch, length = input_ids_BT.shape
        hits = torch.zeros(batch, length, k, dtype=torch.bool, device=input_ids_BT.device)
        wanted = torch.ones_like(input_ids_BT, dtype=torch.bool) if wanted_BT is None else wanted_BT.clone()
        # The chain of row t grows from anchor x_{t+1} and is judged from x_{t+2} on.
        wanted[:, max(length - 2, 0) :] = False
        sequence, row = wanted.nonzero(as_tuple=True)
        if len(row):
            context = self._padded_context(aux_BTK)
            for part in torch.arange(len(row), device=row.device).split(_CHAIN_BLOCKS):
                hits[sequence[part], row[part]] = self._judge(
                    context, input_ids_BT, sequence[part], row[part], embedding_VH, head_VH, k
                )
        return hits

    @torch.no_grad()
    def chain_runs(
        self,
        input_ids_BT: torch.Tensor,
        aux_BTK: torch.Tensor,
        embedding_VH: torch.Tensor,
        k: int,
        head_VH: torch.Tensor | None,
        first_B: torch.Tensor,
        end_B: torch.Tensor,
    ) -> torch.Tensor:
        # All sequences take a round together, and only rounds that happen are computed.
        head_VH = self._need_head(head_VH)
        runs = torch.zeros_like(input_ids_BT)
        context = self._padded_context(aux_BTK)
        row = first_B.clone()
        while len(sequence := (row < end_B).nonzero().flatten()):
            hits = self._judge(context, input_ids_BT, sequence, row[sequence], embedding_VH, head_VH, k)
            run = hits.sum(-1)
            runs[sequence, row[sequence]] = run
            row[sequence] += run + 1
        return runs

    def matches(
        self,
        hidden_NGH: torch.Tensor,
        anchor_ids_N: torch.Tensor,
        text_Nk: torch.Tensor,
        embedding_VH: torch.Tensor,
        head_VH: torch.Tensor,
    ) -> torch.Tensor:
        """[N, k'] bool with k' ≤ k: is guess i the text? What follows the first wrong guess of a block means nothing."""
        guesses = self.guess(hidden_NGH, anchor_ids_N, embedding_VH, head_VH, text_Nk.shape[1])
        return guesses == text_Nk[:, : guesses.shape[1]]

    def _padded_context(self, aux_BTK: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        batch, length, _ = aux_BTK.shape
        return self.context(aux_BTK.flatten(0, 1), torch.arange(length, device=aux_BTK.device).repeat(batch))

    def _judge(
        self,
        context: Sequence[tuple[torch.Tensor, torch.Tensor]],
        input_ids_BT: torch.Tensor,
        sequence_N: torch.Tensor,
        row_N: torch.Tensor,
        embedding_VH: torch.Tensor,
        head_VH: torch.Tensor,
        k: int,
    ) -> torch.Tensor:
        """[N, k] bool: the leading run of right guesses of the blocks anchored behind these rows (ascending per sequence)."""
        length = input_ids_BT.shape[1]
        anchors = row_N + 1
        anchor_ids = input_ids_BT[sequence_N, anchors]
        hidden = self.blocks(context, anchors, anchor_ids, sequence_N * length, embedding_VH)
        ahead = anchors[:, None] + 1 + torch.arange(k, device=anchors.device)
        text = torch.where(ahead < length, input_ids_BT[sequence_N[:, None], ahead.clamp_max(length - 1)], -1)
        found = self.matches(hidden, anchor_ids, text, embedding_VH, head_VH)
        return functional.pad(found, (0, k - found.shape[1])).cummin(-1).values

    def _need_head(self, head_VH: torch.Tensor | None) -> torch.Tensor:
        if head_VH is None:
            raise ConfigError(
                "SF-DRAFT-HEAD", f"a {self.kind} draft guesses with the target's output head; none was given"
            )
        return head_VH


# Blocks that chain_hits runs at once: with 16 slots and a vocabulary of 150k their logits take 1.2 GB in fp32.
_CHAIN_BLOCKS = 128


class BlockDrafter(Drafter):
    """Keeps the context's keys and values of every layer. Slots are never cached: each block is computed anew."""

    def __init__(self, draft: BlockDraft, embedding_VH: torch.Tensor, head_VH: torch.Tensor) -> None:
        self._draft = draft
        self._embedding = embedding_VH
        self._head = head_VH
        self._length = 0
        self._anchor_id = -1
        config, weight = draft.config, draft.fc.weight
        shape = (2 * config.num_layers, 256, config.num_key_value_heads, config.head_dim)
        self._cache = torch.empty(shape, dtype=weight.dtype, device=weight.device)

    @torch.no_grad()
    def extend(self, next_ids: Sequence[int], aux_TKH: torch.Tensor) -> None:
        weight = self._draft.fc.weight
        end = self._length + len(next_ids)
        capacity = self._cache.shape[1]
        if end > capacity:
            grow = max(end, 2 * capacity) - capacity
            self._cache = functional.pad(self._cache, (0, 0, 0, 0, 0, grow))
        positions = torch.arange(self._length, end, device=weight.device)
        for layer, (keys, values) in enumerate(self._draft.context(aux_TKH.to(weight.device), positions)):
            self._cache[2 * layer, self._length : end] = keys
            self._cache[2 * layer + 1, self._length : end] = values
        self._length = end
        self._anchor_id = next_ids[-1]

    @torch.no_grad()
    def propose(self, k: int, pick: Pick = likeliest) -> list[int]:
        """min(k, num_guesses) guesses after the anchor, the last next_id."""
        anchor_ids = torch.tensor([self._anchor_id], device=self._cache.device)
        guesses = self._draft.guess(self.block()[None], anchor_ids, self._embedding, self._head, k, pick)
        return [int(token) for token in guesses[0].tolist()]

    @torch.no_grad()
    def block(self) -> torch.Tensor:
        """The backbone's output [G, H] for the block at the current anchor."""
        device = self._cache.device
        context = [
            (self._cache[2 * layer, : self._length], self._cache[2 * layer + 1, : self._length])
            for layer in range(self._draft.config.num_layers)
        ]
        anchor, anchor_id, start = torch.tensor([[self._length], [self._anchor_id], [0]], device=device)
        return self._draft.blocks(context, anchor, anchor_id, start, self._embedding)[0]
