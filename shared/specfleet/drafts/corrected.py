"""Block drafts that correct themselves: guess i gets a low-rank term that knows the tokens guessed before it.

The backbone fills all slots of a block at once, so its slots do not know one another's choices. These drafts add, to the logits
of each slot, a code c of the tokens before it through one more matrix B: logits = W·z + B·c, with W the target's frozen head
and z the slot's output. Training computes the codes of all slots at once from the text; decoding computes them one by one.

Shapes: N blocks, I guesses of a block (slots first_slot … G − 1), E code size, H hidden size, V vocabulary.
"""

from abc import abstractmethod

import torch

from specfleet.drafts.base import Pick, likeliest
from specfleet.drafts.block import BlockDraft

State = torch.Tensor | None


class CorrectedDraft(BlockDraft):
    @property
    @abstractmethod
    def correction_VE(self) -> torch.Tensor:
        """B, trainable."""

    @abstractmethod
    def codes(self, hidden_NIH: torch.Tensor, previous_NI: torch.Tensor, embedding_VH: torch.Tensor) -> torch.Tensor:
        """[N, I, E]: the code of every guess, given the text. previous_NI: the token before each, the anchor first."""

    @abstractmethod
    def code(
        self, index: int, hidden_NH: torch.Tensor, previous_N: torch.Tensor, state: State, embedding_VH: torch.Tensor
    ) -> tuple[torch.Tensor | None, State]:
        """[N, E] of guess `index` (None: no correction) and the state to pass on; the state of guess 0 is None."""

    def step(
        self,
        index: int,
        hidden_NH: torch.Tensor,
        previous_N: torch.Tensor,
        state: State,
        embedding_VH: torch.Tensor,
        head_VH: torch.Tensor,
    ) -> tuple[torch.Tensor, State]:
        """Logits [N, V] of guess `index` after the tokens previous_N, and the state for the next guess."""
        logits = hidden_NH.to(head_VH.dtype) @ head_VH.T
        code, state = self.code(index, hidden_NH, previous_N, state, embedding_VH)
        if code is not None:
            logits = torch.addmm(logits, code.to(logits.dtype), self.correction_VE.to(logits.dtype).T)
        return logits, state

    def guess(
        self,
        hidden_NGH: torch.Tensor,
        anchor_ids_N: torch.Tensor,
        embedding_VH: torch.Tensor,
        head_VH: torch.Tensor,
        k: int,
        pick: Pick = likeliest,
    ) -> torch.Tensor:
        previous, state, guesses = anchor_ids_N, None, []
        for index in range(min(k, self.config.num_guesses)):
            slot = hidden_NGH[:, self.config.first_slot + index]
            logits, state = self.step(index, slot, previous, state, embedding_VH, head_VH)
            previous = pick(logits)
            guesses.append(previous)
        return torch.stack(guesses, dim=1) if guesses else anchor_ids_N[:, None][:, :0]
