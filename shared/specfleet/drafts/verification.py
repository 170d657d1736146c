"""Which guesses of a round the target accepts: greedily, by lossless rejection sampling, or as SGLang does by default.

The target's distribution p after each guess is its tempered one. The rules differ in how guesses are made and judged:

    greedy       the draft's likeliest token; accepted while it is the target's likeliest.
    rejection    a token d drawn from the draft's distribution q; accepted with probability min(1, p(d)/q(d)), and a refused one
                 is replaced by a draw from max(p − q, 0), normalised. What comes out is distributed as p, whatever q is
                 (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318).
    target_only  the draft's likeliest token; accepted with probability p(d)/threshold_acc, or surely from p(d) ≥ threshold_single
                 on; a refused one is replaced by a draw from p without d. With both thresholds 1 this is rejection sampling with
                 a draft that is certain of its guess, and lossless; with lower ones it is not.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn import functional

from specfleet.contracts.errors import ConfigError
from specfleet.drafts.base import Drafter, likeliest


@dataclass(frozen=True)
class Sampling:
    """temperature 0: always the likeliest token. top_k 0: all tokens; otherwise, and then top_p, the likeliest only.

    Raises ConfigError SF-DECODE-SAMPLING.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not (0 <= self.temperature < float("inf") and self.top_k >= 0 and 0 < self.top_p <= 1):
            raise ConfigError(
                "SF-DECODE-SAMPLING",
                f"temperature ({self.temperature}) and top_k ({self.top_k}) must not be negative, and top_p ({self.top_p}) "
                "must lie above 0 and not above 1",
            )

    def distribution(self, logits_RV: torch.Tensor) -> torch.Tensor:
        """[.., V] fp64, normalised. Equal logits: the smaller id counts as likelier."""
        if self.temperature == 0:
            return functional.one_hot(logits_RV.argmax(-1), logits_RV.shape[-1]).double()
        probs = torch.softmax(logits_RV.double() / self.temperature, -1)
        if not self.top_k and self.top_p == 1:
            return probs
        sorted_probs, ids = probs.sort(dim=-1, descending=True, stable=True)
        if self.top_k:
            sorted_probs[..., self.top_k :] = 0.0
            sorted_probs /= sorted_probs.sum(-1, keepdim=True)
        # The smallest set of tokens that reaches top_p: those before which less than top_p has come together.
        sorted_probs *= sorted_probs.cumsum(-1) - sorted_probs < self.top_p
        sorted_probs /= sorted_probs.sum(-1, keepdim=True)
        return torch.zeros_like(probs).scatter(-1, ids, sorted_probs)


class Chance:
    """Where decoding takes its randomness from."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def happens(self, probability: float) -> bool:
        return probability >= 1 or float(torch.rand((), generator=self._generator, dtype=torch.float64)) < probability

    def draw(self, weights_RV: torch.Tensor) -> torch.Tensor:
        """One id per row [..], each with a chance in proportion to its weight. The rows are independent."""
        rows = weights_RV.reshape(-1, weights_RV.shape[-1]).cpu()
        ids = torch.multinomial(rows, 1, generator=self._generator)
        return ids.view(weights_RV.shape[:-1]).to(weights_RV.device)


@dataclass(frozen=True)
class Proposal:
    """ids: the guesses of a round. probs_KV: what each was drawn from; None: the draft was certain of each."""

    ids: list[int]
    probs_KV: torch.Tensor | None = None


class Rule(ABC):
    name: ClassVar[str]

    @abstractmethod
    def propose(self, drafter: Drafter, k: int) -> Proposal:
        """At most k guesses."""

    @abstractmethod
    def judge(self, proposal: Proposal, logits_RV: torch.Tensor) -> tuple[int, int]:
        """How many leading guesses are accepted, and the target's own token behind them.

        logits_RV: the target's, row i before guess i, one more row than guesses.
        """


class Greedy(Rule):
    name: ClassVar[str] = "greedy"

    def propose(self, drafter: Drafter, k: int) -> Proposal:
        return Proposal(drafter.propose(k))

    def judge(self, proposal: Proposal, logits_RV: torch.Tensor) -> tuple[int, int]:
        choices = logits_RV.argmax(-1).tolist()
        accepted = verify(proposal.ids, choices)
        return accepted, choices[accepted]


class Rejection(Rule):
    """Draft and target are tempered alike: the output is exact either way, and most is accepted so."""

    name: ClassVar[str] = "rejection"

    def __init__(self, sampling: Sampling, chance: Chance) -> None:
        self.sampling, self.chance = sampling, chance

    def propose(self, drafter: Drafter, k: int) -> Proposal:
        drawn_from: list[torch.Tensor] = []

        def pick(logits: torch.Tensor) -> torch.Tensor:
            probs = self.sampling.distribution(logits)
            drawn_from.append(probs.reshape(-1, probs.shape[-1]))
            return self.chance.draw(probs)

        ids = drafter.propose(k, pick)
        # A drafter may drop guesses it made; one that drew none (n-gram lookup) is certain of them.
        return Proposal(ids, torch.cat(drawn_from)[: len(ids)] if drawn_from else None)

    def judge(self, proposal: Proposal, logits_RV: torch.Tensor) -> tuple[int, int]:
        p = self.sampling.distribution(logits_RV)
        q = proposal.probs_KV
        if q is None:
            q = functional.one_hot(torch.tensor(proposal.ids, dtype=torch.int64), p.shape[-1])
        q = q.to(p)
        for index, token in enumerate(proposal.ids):
            if not self._accepts(float(p[index, token]), float(q[index, token])):
                left = (p[index] - q[index]).clamp_min(0)
                # Nothing is left only where p and q are equal up to rounding.
                return index, self._draw(left if left.any() else p[index])
        return len(proposal.ids), self._draw(p[len(proposal.ids)])

    def _accepts(self, p: float, q: float) -> bool:
        return self.chance.happens(p / q)

    def _draw(self, weights_V: torch.Tensor) -> int:
        return int(self.chance.draw(weights_V))


class TargetOnly(Rejection):
    """Raises ConfigError SF-DECODE-SAMPLING."""

    name: ClassVar[str] = "target_only"

    def __init__(
        self, sampling: Sampling, chance: Chance, threshold_single: float = 1.0, threshold_acc: float = 1.0
    ) -> None:
        super().__init__(sampling, chance)
        if not (0 <= threshold_single <= 1 and 0 < threshold_acc <= 1):
            raise ConfigError(
                "SF-DECODE-SAMPLING",
                f"threshold_single ({threshold_single}) must lie in 0..1 and threshold_acc ({threshold_acc}) above 0 and not "
                "above 1",
            )
        self.threshold_single, self.threshold_acc = threshold_single, threshold_acc

    def propose(self, drafter: Drafter, k: int) -> Proposal:
        return Proposal(drafter.propose(k, likeliest))

    def _accepts(self, p: float, q: float) -> bool:
        return p >= self.threshold_single or self.chance.happens(p / self.threshold_acc)


def verify(guesses: Sequence[int], choices: Sequence[int]) -> int:
    """How many leading guesses equal the target's choices (choices[i] is made before guess i is read)."""
    for index, guess in enumerate(guesses):
        if guess != choices[index]:
            return index
    return len(guesses)
