"""Domino: a DFlash backbone and a GRU that reads the block's tokens from left to right to correct its logits.

Guess i (from 0) follows the tokens x_a … x_{a+i}. The GRU reads exactly those, and its state together with the slot's output
gives the correction. Guess 0 stays as the backbone made it. So no state includes the token that is to be guessed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import nn
from torch.nn import functional

from specfleet.drafts.block import BlockConfig
from specfleet.drafts.corrected import CorrectedDraft, State

# Guesses at the start of a block that are left uncorrected. The only value that is served anywhere.
PURE_PREFIX = 1


@dataclass(frozen=True, kw_only=True)
class DominoConfig(BlockConfig):
    """sample_from_anchor is what Domino's configs call shift_label. gru_hidden_size, embedding_size: g and E."""

    gru_hidden_size: int = 1024
    embedding_size: int = 256

    @property
    def num_guesses(self) -> int:
        """Engines verify a block of G tokens, the anchor included: with shift_label the last slot is trained, not served."""
        return self.block_size - 1


class DominoDraft(CorrectedDraft):
    kind: ClassVar[str] = "domino"
    config: DominoConfig

    def __init__(self, config: DominoConfig) -> None:
        super().__init__(config)
        self.prefix_gru = nn.GRU(config.hidden_size, config.gru_hidden_size, bias=False, batch_first=True)
        inner = nn.Linear(config.hidden_size + config.gru_hidden_size, config.embedding_size, bias=False)
        outer = nn.Linear(config.embedding_size, config.vocab_size, bias=False)
        self.embed_proj = nn.Sequential(inner, nn.SiLU(), outer)
        for linear in (inner, outer):
            nn.init.normal_(linear.weight, std=0.02)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        return cls(DominoConfig.from_dict(config))

    @property
    def correction_VE(self) -> torch.Tensor:
        return self.embed_proj.get_parameter("2.weight")

    def codes(self, hidden_NIH: torch.Tensor, previous_NI: torch.Tensor, embedding_VH: torch.Tensor) -> torch.Tensor:
        states_NIg, _ = self.prefix_gru(self._embed(previous_NI, embedding_VH))
        codes = self._code(hidden_NIH[:, PURE_PREFIX:], states_NIg[:, PURE_PREFIX:])
        return functional.pad(codes, (0, 0, PURE_PREFIX, 0))

    def code(
        self, index: int, hidden_NH: torch.Tensor, previous_N: torch.Tensor, state: State, embedding_VH: torch.Tensor
    ) -> tuple[torch.Tensor | None, State]:
        output, state = self.prefix_gru(self._embed(previous_N[:, None], embedding_VH), state)
        return None if index < PURE_PREFIX else self._code(hidden_NH, output[:, 0]), state

    def _embed(self, ids: torch.Tensor, embedding_VH: torch.Tensor) -> torch.Tensor:
        return functional.embedding(ids, embedding_VH).to(self.fc.weight.dtype)

    def _code(self, hidden: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        return self.embed_proj[1](self.embed_proj[0](torch.cat((hidden, state), dim=-1)))
