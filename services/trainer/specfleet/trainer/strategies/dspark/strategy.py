"""Assembles the DSpark strategy: draft, frozen embedding and head (draft's and teacher's alike), batch, objective."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from specfleet.config.models import RunConfig
from specfleet.config.strategies import DSparkSection
from specfleet.drafts.dspark import DSparkDraft
from specfleet.target.text_config import logits_scale
from specfleet.target.weights import read_text_config
from specfleet.trainer.strategies.base import Objective, Prepared
from specfleet.trainer.strategies.block_setup import BlockStrategy, backbone_config, block_identity, place
from specfleet.trainer.strategies.dspark.batch import collate
from specfleet.trainer.strategies.dspark.objective import CONFIDENCE, SLOTS, dspark_objective
from specfleet.trainer.strategies.eagle_setup import check_final_state
from specfleet.wire.records_pb2 import CaptureContract

if TYPE_CHECKING:
    from specfleet.data.prompt_set import PromptSet


class DSparkStrategy(BlockStrategy):
    """Two terms, both weighted means over the supervised slots: what is guessed, and the price put on it."""

    def __init__(
        self,
        section: DSparkSection,
        draft: DSparkDraft,
        embedding_VH: torch.Tensor,
        head_VH: torch.Tensor,
        seed: int = 0,
        teacher_scale: float = 1.0,
    ) -> None:
        """teacher_scale: between head · state and the target's logits; a draft's states take the head alone."""
        super().__init__(section, draft, embedding_VH, head_VH, seed)
        self.draft: DSparkDraft = draft
        self.term_weights = {SLOTS: 1.0}
        if section.confidence_head:
            self.term_weights[CONFIDENCE] = section.confidence_weight
        self._section = section
        self._teacher_scale = teacher_scale

    def collate(self, samples: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        return collate(samples, self._plan, self._section.loss_decay)

    def prepare(self, batch: dict[str, torch.Tensor]) -> Prepared:
        found = super().prepare(batch)
        if self._teacher_scale != 1.0:
            found.tensors["teacher_states"] = found.tensors["teacher_states"] * self._teacher_scale
        return found

    def objective(self, prepared: Prepared) -> Objective:
        section = self._section
        return dspark_objective(self.draft, self._embedding, self._head, prepared, section.ce_weight, section.l1_weight)

    def identity(self) -> dict[str, str]:
        section, config = self._section, self.draft.config
        return {
            **block_identity(section, config),
            "markov_head": config.markov_head,
            "markov_rank": str(config.markov_rank),
            "confidence_head": str(config.confidence_head),
            "confidence_with_markov": str(config.confidence_with_markov),
            "ce_weight": str(section.ce_weight),
            "l1_weight": str(section.l1_weight),
            "confidence_weight": str(section.confidence_weight),
        }


def build_dspark(
    config: RunConfig,
    contract: CaptureContract,
    target_dir: Path,
    prompt_set: "PromptSet",
    total_steps: int,
    device: torch.device,
    dtype: torch.dtype,
) -> DSparkStrategy:
    """Draft initialised from torch's global generator, or from strategy.init_from.

    Raises ConfigError SF-CONFIG-FINAL-STATE when capture does not record the state the teacher is computed from.
    """
    section = config.strategy
    assert isinstance(section, DSparkSection)
    check_final_state("dspark", contract)
    draft = DSparkDraft.from_config(
        {
            **backbone_config(section, contract, target_dir, sample_from_anchor=True),
            "markov_head": section.markov_head,
            "markov_rank": section.markov_rank,
            "confidence_head": section.confidence_head,
            "confidence_with_markov": section.confidence_with_markov,
        }
    )
    draft, embedding, head = place(draft, section, contract, target_dir, device, dtype)
    scale = logits_scale(read_text_config(target_dir))
    return DSparkStrategy(section, draft, embedding, head, config.trainer.seed, scale)
