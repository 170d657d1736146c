"""DFlash (arXiv 2602.06036): the bare backbone. Every slot's guess is the target's head applied to its output."""

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch

from specfleet.drafts.base import Pick, likeliest
from specfleet.drafts.block import BlockConfig, BlockDraft


class DFlashDraft(BlockDraft):
    kind: ClassVar[str] = "dflash"

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        return cls(BlockConfig.from_dict(config))

    def guess(
        self,
        hidden_NGH: torch.Tensor,
        anchor_ids_N: torch.Tensor,
        embedding_VH: torch.Tensor,
        head_VH: torch.Tensor,
        k: int,
        pick: Pick = likeliest,
    ) -> torch.Tensor:
        first = self.config.first_slot
        slots = hidden_NGH[:, first : first + k]
        return pick(slots.to(head_VH.dtype) @ head_VH.T)

    def matches(
        self,
        hidden_NGH: torch.Tensor,
        anchor_ids_N: torch.Tensor,
        text_Nk: torch.Tensor,
        embedding_VH: torch.Tensor,
        head_VH: torch.Tensor,
    ) -> torch.Tensor:
        # The head is most of the work, and slots behind a wrong guess need none of it.
        depth, first = min(text_Nk.shape[1], self.config.num_guesses), self.config.first_slot
        found = torch.zeros(len(text_Nk), depth, dtype=torch.bool, device=text_Nk.device)
        alive = torch.arange(len(text_Nk), device=text_Nk.device)
        for i in range(depth):
            right = (hidden_NGH[alive, first + i].to(head_VH.dtype) @ head_VH.T).argmax(-1) == text_Nk[alive, i]
            alive = alive[right]
            found[alive, i] = True
            if not len(alive):
                break
        return found
