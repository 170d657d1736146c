"""DFlash (arXiv 2602.06036): the bare backbone. Every slot's guess is the target's head applied to its output."""

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch

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
    ) -> torch.Tensor:
        first = self.config.first_slot
        slots = hidden_NGH[:, first : first + k]
        return (slots.to(head_VH.dtype) @ head_VH.T).argmax(-1)
