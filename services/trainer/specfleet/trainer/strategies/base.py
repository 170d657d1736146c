"""The one shape of a training strategy. Five small pieces: features, batch, draft, objective, export.

features  specfleet.config.features (torch-free, so that contracts can be written anywhere)
batch     strategies/NAME/batch.py: stored features → padded tensors
draft     specfleet.drafts.NAME: architecture and decoding
objective strategies/NAME/objective.py: numerators and denominators
export    specfleet.drafts.export: layouts per serving engine

The reduction contract: a loss is Σ_terms weight · (Σ numerator / Σ denominator), where both sums run over every rank and
every micro-batch of one optimizer step. Denominators are counts that `prepare` knows before any gradient exists, so the
loop reduces them first and each micro-batch is scaled exactly. Splitting a batch, padding it, or changing the world size
therefore does not change the gradient.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from specfleet.drafts.base import Draft


@dataclass
class Prepared:
    """One micro-batch on the device, with teacher facts computed (no gradient) and its share of every denominator."""

    tensors: dict[str, torch.Tensor]
    denominators: dict[str, torch.Tensor]
    """Term name → float32 scalar on the device. Zero is legal: a micro-batch without valid rows still runs."""
    num_tokens: int
    num_loss_tokens: int


@dataclass
class Objective:
    """Numerators per term (scalars that carry the gradient) and metrics as (numerator, denominator) pairs without gradient."""

    numerators: dict[str, torch.Tensor]
    metrics: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)


class Strategy(ABC):
    draft: Draft
    """The trainable module; parameters and persistent buffers already carry the names they are exported under."""
    term_weights: dict[str, float]
    """Term name → weight in the loss. The same names appear in every Prepared and Objective."""
    step: int = 1
    """The optimizer step now prepared and trained, from 1: what schedules follow."""

    def begin_step(self, step: int) -> None:
        """Called before the micro-batches of an optimizer step are prepared, restarts included."""
        self.step = step

    @abstractmethod
    def collate(self, samples: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Features of one micro-batch, as the store returned them (CPU), → padded CPU tensors. Runs in the prefetch thread.

        Each sample also has `visit` [2] int64, its epoch and prompt index: the source of all randomness (draws.py).
        """

    @abstractmethod
    def prepare(self, batch: dict[str, torch.Tensor]) -> Prepared:
        """Moves the batch to the device, runs the frozen teacher where needed, builds masks, counts denominators."""

    @abstractmethod
    def objective(self, prepared: Prepared) -> Objective:
        """Forward pass. Every trainable parameter takes part even when no row is valid."""

    @abstractmethod
    def identity(self) -> dict[str, str]:
        """Facts a resumed run must agree with (strategy, draft_vocab_size, ttt_length, mask_token_id …)."""
