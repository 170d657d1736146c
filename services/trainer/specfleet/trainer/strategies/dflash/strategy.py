"""Assembles the DFlash strategy: draft, frozen embedding and head, batch, objective."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from specfleet.config.models import RunConfig
from specfleet.config.strategies import DFlashSection
from specfleet.drafts.dflash import DFlashDraft
from specfleet.trainer.strategies.base import Objective, Prepared
from specfleet.trainer.strategies.block_setup import BlockStrategy, backbone_config, block_identity, place
from specfleet.trainer.strategies.dflash.batch import collate
from specfleet.trainer.strategies.dflash.objective import TERM, dflash_objective
from specfleet.wire.records_pb2 import CaptureContract

if TYPE_CHECKING:
    from specfleet.data.prompt_set import PromptSet


class DFlashStrategy(BlockStrategy):
    """One term: the weighted mean of the slots' cross entropies (D-PACE: a sum per supervised slot or per sequence)."""

    draft: DFlashDraft

    def __init__(
        self,
        section: DFlashSection,
        draft: DFlashDraft,
        embedding_VH: torch.Tensor,
        head_VH: torch.Tensor,
        seed: int = 0,
    ) -> None:
        super().__init__(section, draft, embedding_VH, head_VH, seed)
        self.draft = draft
        self.term_weights = {TERM: 1.0}
        self._section = section

    def collate(self, samples: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        return collate(samples, self._plan, self._section)

    def objective(self, prepared: Prepared) -> Objective:
        section = self._section
        return dflash_objective(self.draft, self._embedding, self._head, prepared, section.loss, section.dpace_alpha)

    def identity(self) -> dict[str, str]:
        section = self._section
        return {
            **block_identity(section, self.draft.config),
            "loss": section.loss,
            "dpace_alpha": str(section.dpace_alpha),
            "dpace_norm": section.dpace_norm,
        }


def build_dflash(
    config: RunConfig,
    contract: CaptureContract,
    target_dir: Path,
    prompt_set: "PromptSet",
    total_steps: int,
    device: torch.device,
    dtype: torch.dtype,
) -> DFlashStrategy:
    """Draft initialised from torch's global generator, or from strategy.init_from."""
    section = config.strategy
    assert isinstance(section, DFlashSection)
    draft = DFlashDraft.from_config(backbone_config(section, contract, target_dir, sample_from_anchor=False))
    draft, embedding, head = place(draft, section, contract, target_dir, device, dtype)
    return DFlashStrategy(section, draft, embedding, head, config.trainer.seed)
