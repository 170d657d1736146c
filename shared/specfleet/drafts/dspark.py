"""DSpark: a block backbone whose anchor slot predicts too, a Markov head on the previous token, a head that prices each guess.

Slot k stands at a + k and predicts x_{a+k+1}, so a block of G slots makes G guesses. The Markov head adds W₂·c to the logits,
with c made from the embedding W₁[y] of the token y = x_{a+k} before the guess:

    vanilla  c = W₁[y]
    gated    c = σ(gate([h; W₁[y]])) ⊙ W₁[y]
    rnn      [γ, u, o] = joint([s; W₁[y]; h]),  s' = σ(γ)⊙s + (1 − σ(γ))⊙tanh(u),  c = tanh(o),  s = 0 at the anchor

The confidence head estimates, from [h; W₁[y]], the chance that lossless sampling accepts the guess.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import nn

from specfleet.contracts.errors import ConfigError
from specfleet.drafts.base import Pick, likeliest
from specfleet.drafts.block import BlockConfig, BlockDrafter
from specfleet.drafts.corrected import CorrectedDraft, State

MARKOV_HEADS = ("vanilla", "gated", "rnn")


@dataclass(frozen=True, kw_only=True)
class DSparkConfig(BlockConfig):
    sample_from_anchor: bool = True
    markov_head: str = "vanilla"
    markov_rank: int = 256
    confidence_head: bool = True
    confidence_with_markov: bool = True
    """Whether the confidence head sees W₁[y] beside the slot's output."""

    def problems(self) -> list[str]:
        found = super().problems()
        if not self.sample_from_anchor:
            found.append("sample_from_anchor must be true: the anchor slot of a DSpark block predicts")
        if self.markov_head not in MARKOV_HEADS:
            found.append(f"markov_head {self.markov_head!r} must be one of {', '.join(MARKOV_HEADS)}")
        if self.markov_rank < 1:
            found.append(f"markov_rank ({self.markov_rank}) must be at least 1")
        return found


class MarkovHead(nn.Module):
    """Codes [.., r] of guesses from the previous token's embedding [.., r] and the slot's output [.., H]."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        rank, hidden = config.markov_rank, config.hidden_size
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.vocab_size, bias=False)
        if config.markov_head == "gated":
            self.gate_proj = nn.Linear(hidden + rank, rank)
        if config.markov_head == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden, 3 * rank)
        self._kind = config.markov_head

    def forward(self, hidden: torch.Tensor, embedded: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        """The codes, and the state for the next slot (rnn only; None: the anchor's)."""
        match self._kind:
            case "vanilla":
                return embedded, None
            case "gated":
                return torch.sigmoid(self.gate_proj(torch.cat((hidden, embedded), dim=-1))) * embedded, None
        state = torch.zeros_like(embedded) if state is None else state
        keep, update, out = self.joint_proj(torch.cat((state, embedded, hidden), dim=-1)).chunk(3, dim=-1)
        keep = torch.sigmoid(keep)
        return torch.tanh(out), keep * state + (1 - keep) * torch.tanh(update)

    def along(self, hidden_NIH: torch.Tensor, embedded_NIr: torch.Tensor) -> torch.Tensor:
        """[N, I, r]: all guesses of each block."""
        if self._kind != "rnn":
            return self(hidden_NIH, embedded_NIr, None)[0]
        state, codes = None, []
        for hidden, embedded in zip(hidden_NIH.unbind(1), embedded_NIr.unbind(1), strict=True):
            code, state = self(hidden, embedded, state)
            codes.append(code)
        return torch.stack(codes, dim=1)


class ConfidenceHead(nn.Module):
    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.with_markov = config.confidence_with_markov
        self.proj = nn.Linear(config.hidden_size + (config.markov_rank if self.with_markov else 0), 1)

    def forward(self, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """Logits [..] of the acceptance chance."""
        features = torch.cat((hidden, embedded), dim=-1) if self.with_markov else hidden
        return self.proj(features)[..., 0]


class DSparkDraft(CorrectedDraft):
    kind: ClassVar[str] = "dspark"
    config: DSparkConfig

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config)
        self.markov_head = MarkovHead(config)
        if config.confidence_head:
            self.confidence_head = ConfidenceHead(config)
        for head in (self.markov_head, *([self.confidence_head] if config.confidence_head else [])):
            for name, parameter in head.named_parameters():
                if name.endswith("bias"):
                    nn.init.zeros_(parameter)
                else:
                    nn.init.normal_(parameter, std=0.02)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        return cls(DSparkConfig.from_dict(config))

    @property
    def correction_VE(self) -> torch.Tensor:
        return self.markov_head.markov_w2.weight

    def codes(self, hidden_NIH: torch.Tensor, previous_NI: torch.Tensor, embedding_VH: torch.Tensor) -> torch.Tensor:
        return self.markov_head.along(hidden_NIH, self.markov_head.markov_w1(previous_NI))

    def code(
        self, index: int, hidden_NH: torch.Tensor, previous_N: torch.Tensor, state: State, embedding_VH: torch.Tensor
    ) -> tuple[torch.Tensor | None, State]:
        code, state = self.markov_head(hidden_NH, self.markov_head.markov_w1(previous_N), state)
        return code, state

    def confidence(self, hidden: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        """Logits [..] of the chance that the guess from `hidden` [.., H] after the token `previous` [..] is accepted.

        Raises ConfigError SF-DRAFT-CONFIDENCE when the draft was built without a confidence head.
        """
        if not self.config.confidence_head:
            raise ConfigError(
                "SF-DRAFT-CONFIDENCE", "this draft has no confidence head; train it with strategy.confidence_head true"
            )
        logits: torch.Tensor = self.confidence_head(hidden, self.markov_head.markov_w1(previous))
        return logits

    def drafter(
        self, embedding_VH: torch.Tensor, head_VH: torch.Tensor | None = None, min_confidence: float = 0.0
    ) -> "DSparkDrafter":
        """min_confidence: a chain ends before the first guess whose chance of acceptance is estimated below it."""
        return DSparkDrafter(self, embedding_VH, self._need_head(head_VH), min_confidence)


class DSparkDrafter(BlockDrafter):
    def __init__(
        self, draft: DSparkDraft, embedding_VH: torch.Tensor, head_VH: torch.Tensor, min_confidence: float = 0.0
    ) -> None:
        super().__init__(draft, embedding_VH, head_VH)
        self._dspark = draft
        self._min_confidence = min_confidence

    @torch.no_grad()
    def propose(self, k: int, pick: Pick = likeliest) -> list[int]:
        """As in the base class, cut where the confidence falls below the minimum; possibly empty.

        The confidence in a guess is formed before the guess, from the token in front of it, so the cut cannot favour tokens.
        """
        if self._min_confidence <= 0:
            return super().propose(k, pick)
        hidden_GH = self.block()
        anchor = torch.tensor([self._anchor_id], device=hidden_GH.device)
        guesses = self._dspark.guess(hidden_GH[None], anchor, self._embedding, self._head, k, pick)[0]
        previous = torch.cat((anchor, guesses))[: len(guesses)]
        chances = torch.sigmoid(self._dspark.confidence(hidden_GH[: len(guesses)], previous).float())
        return guesses[: _leading(chances.tolist(), self._min_confidence)].tolist()


def _leading(chances: Sequence[float], minimum: float) -> int:
    """How many chances come before the first below the minimum."""
    return next((index for index, chance in enumerate(chances) if chance < minimum), len(chances))
