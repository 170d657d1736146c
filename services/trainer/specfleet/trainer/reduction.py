"""One step's gradient, whatever the split into ranks and micro-batches (docs/design.md §9, strategies/base.py)."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch

from specfleet.trainer.optim import MasterAdamW
from specfleet.trainer.parallel import Ranks
from specfleet.trainer.strategies.base import Prepared, Strategy


@dataclass
class Sums:
    """One rank's share of a step: (numerator, denominator) per metric, and counts; added up before any ratio."""

    pairs: dict[str, tuple[float, float]] = field(default_factory=dict)
    """`loss` has denominator 0: its terms are already divided by the global denominators, so it is a plain sum."""
    num_tokens: int = 0
    num_loss_tokens: int = 0
    num_samples: int = 0

    def fact(self) -> dict[str, Any]:
        """As JSON, for Ranks.gather."""
        return {"pairs": self.pairs, "counts": [self.num_tokens, self.num_loss_tokens, self.num_samples]}

    @classmethod
    def total(cls, facts: Sequence[dict[str, Any]]) -> Self:
        total = cls()
        for fact in facts:
            for name, (numerator, denominator) in fact["pairs"].items():
                total.add(name, numerator, denominator)
            tokens, loss_tokens, samples = fact["counts"]
            total.num_tokens += tokens
            total.num_loss_tokens += loss_tokens
            total.num_samples += samples
        return total

    def add(self, name: str, numerator: float, denominator: float) -> None:
        old = self.pairs.get(name, (0.0, 0.0))
        self.pairs[name] = (old[0] + numerator, old[1] + denominator)


@dataclass
class Share:
    """One rank's share of a step as the device knows it. Nothing waits for the device before `read`."""

    num_tokens: int
    num_loss_tokens: int
    names: list[str] = field(default_factory=list)
    values: torch.Tensor | None = None
    """[2 · len(names)] float64 on the device: numerator and denominator of each name, in turn."""

    def read(self) -> Sums:
        """Waits for the step and fetches all its numbers in one transfer."""
        sums = Sums(num_tokens=self.num_tokens, num_loss_tokens=self.num_loss_tokens)
        values = [] if self.values is None else self.values.tolist()
        for name, numerator, denominator in zip(self.names, values[::2], values[1::2], strict=True):
            sums.add(name, numerator, denominator)
        return sums


def accumulate(
    strategy: Strategy, batches: Sequence[dict[str, torch.Tensor]], optimizer: MasterAdamW, ranks: Ranks
) -> Share:
    """Forward and backward of this rank's micro-batches (possibly none); gradients end up in the optimizer's fp32 sum.

    Collective: denominators are summed over ranks between the preparation of the micro-batches and the first forward.
    """
    prepared = [strategy.prepare(batch) for batch in batches]
    terms = sorted(strategy.term_weights)
    scales = _scales(strategy, terms, prepared, ranks)
    share = Share(
        num_tokens=sum(item.num_tokens for item in prepared),
        num_loss_tokens=sum(item.num_loss_tokens for item in prepared),
    )
    values: list[torch.Tensor] = []
    while prepared:
        # Popped, so that a micro-batch's memory is free once its backward is done.
        objective = strategy.objective(prepared.pop(0))
        numerators = torch.stack([objective.numerators[name].float() for name in terms])
        loss = (numerators * scales).sum()
        loss.backward()
        optimizer.collect()
        share.names += ["loss", *objective.metrics]
        values += [loss.detach(), torch.zeros_like(loss)]
        values += [value.detach() for pair in objective.metrics.values() for value in pair]
    if values:
        share.values = torch.stack(values).double()
    return share


def _scales(strategy: Strategy, terms: list[str], prepared: list[Prepared], ranks: Ranks) -> torch.Tensor:
    """[terms] fp32 on the device: weight / Σ denominator over ranks and micro-batches, 0 where that sum is 0."""
    device = next(strategy.draft.parameters()).device
    denominators = torch.zeros(len(terms), dtype=torch.float32, device=device)
    for item in prepared:
        denominators += torch.stack([item.denominators[name].float() for name in terms])
    ranks.sum_(denominators)
    weights = torch.tensor([strategy.term_weights[name] for name in terms], device=device)
    return torch.where(denominators > 0, weights / denominators.clamp_min(torch.finfo(torch.float32).tiny), 0.0)
