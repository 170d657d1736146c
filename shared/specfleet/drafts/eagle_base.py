"""What the drafts of the EAGLE family share: sizes, the layer over [embedding, feature], the draft vocabulary."""

from abc import ABC
from dataclasses import dataclass

import torch
from torch import nn

from specfleet.contracts.errors import ConfigError
from specfleet.drafts.base import Draft
from specfleet.drafts.config import DraftConfig
from specfleet.drafts.layers import DecoderLayer, GroupedQueryProjections, RMSNorm, Rope


@dataclass(frozen=True, kw_only=True)
class EagleSizes(DraftConfig):
    draft_vocab_size: int
    target_hidden_size: int

    @property
    def num_aux(self) -> int:
        return len(self.layer_ids)

    def problems(self) -> list[str]:
        found = super().problems()
        if not 0 < self.draft_vocab_size <= self.vocab_size:
            found.append(
                f"draft_vocab_size ({self.draft_vocab_size}) must lie between 1 and vocab_size ({self.vocab_size})"
            )
        return found


class EagleLayer(DecoderLayer):
    """A decoder layer whose attention reads [normed embedding, normed feature].

    Its residual is the feature: raw, or with norm_before_residual the normed one.
    """

    def __init__(self, sizes: EagleSizes, mlp: nn.Module, *, norm_before_residual: bool = False) -> None:
        size, eps = sizes.hidden_size, sizes.rms_norm_eps
        attention = GroupedQueryProjections(
            2 * size, size, sizes.num_attention_heads, sizes.num_key_value_heads, sizes.head_dim
        )
        super().__init__(size, eps, attention, mlp)
        self.hidden_norm = RMSNorm(size, eps)
        self.norm_before_residual = norm_before_residual

    def attention_input(self, embedding_RH: torch.Tensor, feature_RH: torch.Tensor) -> torch.Tensor:
        return torch.cat((self.input_layernorm(embedding_RH), self.hidden_norm(feature_RH)), dim=-1)

    def finish(self, feature_RH: torch.Tensor, attended_RNd: torch.Tensor) -> torch.Tensor:
        return super().finish(self.hidden_norm(feature_RH) if self.norm_before_residual else feature_RH, attended_RNd)


class EagleDraft(Draft, ABC):
    """d2t: offsets, target id of draft id j is j + d2t[j]. t2d: which target ids the draft can propose."""

    config: EagleSizes
    d2t: torch.Tensor
    t2d: torch.Tensor
    rope: Rope

    def _add_vocabulary(self, *, saved: bool) -> None:
        """Buffers with the map "the first V_d ids". saved: whether they are part of the state dict."""
        sizes = self.config
        self.register_buffer("d2t", torch.zeros(sizes.draft_vocab_size, dtype=torch.int64), persistent=saved)
        self.register_buffer("t2d", torch.arange(sizes.vocab_size) < sizes.draft_vocab_size, persistent=saved)

    def _initialise(self) -> None:
        """Rotary table and initial weights of every linear layer."""
        sizes = self.config
        self.rope = Rope(sizes.head_dim, sizes.rope_theta, sizes.rope_scaling, sizes.max_position_embeddings)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)

    def set_vocabulary(self, d2t: torch.Tensor, t2d: torch.Tensor) -> None:
        """Installs a vocabulary map. Raises ConfigError SF-DRAFT-VOCAB when the two halves disagree."""
        chosen = t2d.nonzero().flatten()
        if (
            d2t.shape != self.d2t.shape
            or t2d.shape != self.t2d.shape
            or not torch.equal(chosen, d2t + torch.arange(len(d2t), device=d2t.device))
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

    def target_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits over the draft vocabulary [.., V_d] → over the target's [.., V], −∞ where the draft has no token."""
        wide = logits.new_full((*logits.shape[:-1], self.config.vocab_size), -torch.inf)
        wide[..., self.t2d] = logits  # the map keeps the order of ids
        return wide

    def _per_query_head(self, x_RHd: torch.Tensor, batch: int) -> torch.Tensor:
        """Keys or values [B·T, n_kv, d] → [B, n_q, T, d], as the prefix of `ttt_attention`."""
        groups = self.config.num_attention_heads // self.config.num_key_value_heads
        return x_RHd.unflatten(0, (batch, -1)).transpose(1, 2).repeat_interleave(groups, dim=1)
