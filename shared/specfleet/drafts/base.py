"""The one shape of a draft architecture: a module that trains under its exported names, and a proposer for decoding."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import nn

Pick = Callable[[torch.Tensor], torch.Tensor]
"""A draft's logits over the target's vocabulary [.., V] (−∞: it cannot say this) → the id to guess per row [..]."""


def likeliest(logits: torch.Tensor) -> torch.Tensor:
    return logits.argmax(-1)


class Drafter(ABC):
    """Proposes tokens for one sequence. Verified target states go in with `extend`, guesses come out of `propose`.

    Position bookkeeping is the drafter's: the i-th row ever given to `extend` is position i of the sequence.
    """

    @abstractmethod
    def extend(self, next_ids: Sequence[int], aux_TKH: torch.Tensor) -> None:
        """Rows for newly verified positions p, p+1, …: the target's aux states there, and the token that follows each.

        next_ids[i] is the token at position p+i+1; the last one has not been run through the target yet. Anything the
        drafter cached for guesses is dropped first.
        """

    @abstractmethod
    def propose(self, k: int, pick: Pick = likeliest) -> list[int]:
        """At most k guesses (target vocabulary ids) for the tokens after the last next_id.

        pick is asked for every guess, in order, with the logits behind it, which know the guesses before it as far as the
        architecture lets them. Guesses may be dropped from the end, for reasons that do not look at what was picked there.
        A drafter without logits is certain of its guesses and asks nobody.
        """


class Draft(nn.Module, ABC):
    """A draft model. `state_dict()` names are the exported names; frozen target weights are not part of it."""

    kind: ClassVar[str]
    """Name in the registry table (specfleet.drafts.registry)."""
    config: Any
    """A frozen dataclass (DraftConfig) with `to_dict()`; `from_config(config.to_dict())` rebuilds the same architecture."""

    @classmethod
    @abstractmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """An untrained draft with the architecture's own initialisation (uses torch's global generator)."""

    @property
    def max_draft_tokens(self) -> int | None:
        """The longest chain one round can propose; None: no limit of its own."""
        return None

    @abstractmethod
    def drafter(self, embedding_VH: torch.Tensor, head_VH: torch.Tensor | None = None) -> Drafter:
        """A fresh proposer that reads this module's weights.

        embedding_VH, head_VH: the target's input embedding and output head. Drafts with a head of their own ignore head_VH;
        the others raise ConfigError SF-DRAFT-HEAD without it.
        """

    def chain_hits(
        self,
        input_ids_BT: torch.Tensor,
        aux_BTK: torch.Tensor,
        embedding_VH: torch.Tensor,
        k: int,
        head_VH: torch.Tensor | None = None,
        wanted_BT: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[B, T, k] bool: from row t, are guesses 0 … i all equal to the text x_{t+2} … x_{t+2+i}?

        Up to the first wrong guess a greedy chain is fed exactly the text, so one teacher-forced pass answers for every
        row what `Drafter.propose` would be accepted for. Past the end of a sequence, and beyond what the draft can propose,
        the answer is False; rows in padding hold nothing meaningful. wanted_BT: bool, the only rows whose answers the
        caller will read (None: all); the others may be left False, which saves their work.
        """
        raise NotImplementedError(f"{type(self).__name__} has no batched chain; walk its drafter instead")

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
        """[B, T] int64: guesses accepted from row t, for the rows of the walk t = first, t + run + 1, … below end.

        The other rows mean nothing, so that drafts for which every row costs a pass of its own need not compute them.
        """
        rows = torch.arange(input_ids_BT.shape[1], device=input_ids_BT.device)
        wanted = (rows >= first_B[:, None]) & (rows < end_B[:, None])
        hits = self.chain_hits(input_ids_BT, aux_BTK, embedding_VH, k, head_VH=head_VH, wanted_BT=wanted)
        return hits.cumprod(-1).sum(-1)
