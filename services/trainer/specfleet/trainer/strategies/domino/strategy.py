"""Assembles the Domino strategy: draft, frozen embedding and head, batch, curriculum, objective."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from specfleet.config.models import RunConfig
from specfleet.config.strategies import DominoSection
from specfleet.drafts.domino import DominoDraft
from specfleet.trainer.strategies.base import Objective, Prepared
from specfleet.trainer.strategies.block_setup import BlockStrategy, backbone_config, block_identity, place
from specfleet.trainer.strategies.domino.batch import collate
from specfleet.trainer.strategies.domino.objective import TERM, domino_objective
from specfleet.trainer.strategies.domino.schedule import base_weight
from specfleet.wire.records_pb2 import CaptureContract

if TYPE_CHECKING:
    from specfleet.data.prompt_set import PromptSet


class DominoStrategy(BlockStrategy):
    """One term: the weighted mean over supervised slots of (1 − λ)·CE(corrected) + λ·CE(uncorrected)."""

    def __init__(
        self,
        section: DominoSection,
        draft: DominoDraft,
        embedding_VH: torch.Tensor,
        head_VH: torch.Tensor,
        total_steps: int,
        seed: int = 0,
    ) -> None:
        super().__init__(section, draft, embedding_VH, head_VH, seed)
        self.draft: DominoDraft = draft
        self.term_weights = {TERM: 1.0}
        self._section = section
        self._total_steps = total_steps

    @property
    def base_weight(self) -> float:
        """λ of the current optimizer step."""
        section = self._section
        return base_weight(self.step - 1, self._total_steps, section.base_weight, section.base_decay_ratio)

    def collate(self, samples: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        return collate(samples, self._plan, self._section.loss_decay)

    def objective(self, prepared: Prepared) -> Objective:
        return domino_objective(self.draft, self._embedding, self._head, prepared, self.base_weight)

    def identity(self) -> dict[str, str]:
        section, config = self._section, self.draft.config
        return {
            **block_identity(section, config),
            "shift_label": str(config.sample_from_anchor),
            "gru_hidden_size": str(config.gru_hidden_size),
            "embedding_size": str(config.embedding_size),
            "base_weight": str(section.base_weight),
            "base_decay_ratio": str(section.base_decay_ratio),
        }


def build_domino(
    config: RunConfig,
    contract: CaptureContract,
    target_dir: Path,
    prompt_set: "PromptSet",
    total_steps: int,
    device: torch.device,
    dtype: torch.dtype,
) -> DominoStrategy:
    """Draft initialised from torch's global generator, or from strategy.init_from."""
    section = config.strategy
    assert isinstance(section, DominoSection)
    draft = DominoDraft.from_config(
        {
            **backbone_config(section, contract, target_dir, sample_from_anchor=section.shift_label),
            "gru_hidden_size": section.gru_hidden_size,
            "embedding_size": section.embedding_size,
        }
    )
    draft, embedding, head = place(draft, section, contract, target_dir, device, dtype)
    return DominoStrategy(section, draft, embedding, head, total_steps, config.trainer.seed)
