"""Assembles the P-EAGLE strategy: draft, frozen teacher, sampled chains, objective."""

from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from specfleet.config.models import RunConfig
from specfleet.config.strategies import PEagleSection
from specfleet.drafts.peagle import PEagleConfig, PEagleDraft
from specfleet.drafts.warm_start import stated_mask_token
from specfleet.target.dtypes import compute_dtype
from specfleet.target.mask_token import resolve_mask_token
from specfleet.target.weights import load_embedding, read_text_config
from specfleet.trainer.strategies.base import Objective, Prepared, Strategy
from specfleet.trainer.strategies.draws import visit_seeds
from specfleet.trainer.strategies.eagle_setup import (
    check_final_state,
    draft_sizes,
    judged,
    load_teacher,
    set_up_vocabulary,
)
from specfleet.trainer.strategies.peagle.batch import collate
from specfleet.trainer.strategies.peagle.objective import TERM, peagle_objective
from specfleet.trainer.strategies.soft_ce import chunk_rows
from specfleet.trainer.strategies.teacher import FrozenTeacher
from specfleet.wire.records_pb2 import CaptureContract

if TYPE_CHECKING:
    from specfleet.data.prompt_set import PromptSet


class PEagleStrategy(Strategy):
    """One term: the mean over sampled elements."""

    draft: PEagleDraft

    def __init__(self, section: PEagleSection, draft: PEagleDraft, teacher: FrozenTeacher, seed: int = 0) -> None:
        """seed: of the chains drawn."""
        self.draft = draft
        self.term_weights = {TERM: 1.0}
        self.chunk_rows = chunk_rows(draft.config.draft_vocab_size, draft.fc.weight.device)
        self._section = section
        self._teacher = teacher
        self._seed = seed

    def collate(self, samples: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        section = self._section
        return collate(
            samples,
            visit_seeds(samples, self._seed),
            section.num_depths,
            section.mask_align,
            section.keep_ratio,
            section.keep_ratio_min,
        )

    @torch.no_grad()
    def prepare(self, batch: dict[str, torch.Tensor]) -> Prepared:
        tensors = judged(batch, self._teacher, self.draft.t2d, mass=False)
        return Prepared(
            tensors=tensors,
            denominators={TERM: tensors["teacher_in_vocab"][tensors["teacher_of"]].sum().float()},
            num_tokens=int(batch["num_tokens"]),
            num_loss_tokens=int(batch["num_loss_tokens"]),
        )

    def objective(self, prepared: Prepared) -> Objective:
        return peagle_objective(self.draft, prepared, self.chunk_rows)

    def identity(self) -> dict[str, str]:
        config, section = self.draft.config, self._section
        return {
            "strategy": section.name,
            "layers": ",".join(map(str, config.layer_ids)),
            "draft_vocab_size": str(config.draft_vocab_size),
            "draft_vocab": sha256(self.draft.d2t.cpu().numpy().tobytes()).hexdigest(),
            "intermediate_size": str(config.intermediate_size),
            "num_layers": str(config.num_layers),
            "num_depths": str(config.num_depths),
            "mask_token_id": str(config.mask_token_id),
            "norm_before_residual": str(config.norm_before_residual),
            "keep_ratio": f"{section.keep_ratio}, at least {section.keep_ratio_min}",
            "mask_align": section.mask_align,
        }


def build_peagle(
    config: RunConfig,
    contract: CaptureContract,
    target_dir: Path,
    prompt_set: "PromptSet",
    total_steps: int,
    device: torch.device,
    dtype: torch.dtype,
) -> PEagleStrategy:
    """Draft initialised from torch's global generator, its embedding from the target's."""
    section = config.strategy
    assert isinstance(section, PEagleSection)
    check_final_state("peagle", contract)
    draft = PEagleDraft(
        PEagleConfig(
            **draft_sizes(section, contract, read_text_config(target_dir)),
            num_layers=section.num_layers,
            num_depths=section.num_depths,
            mask_token_id=resolve_mask_token(target_dir, section.mask_token_id, stated_mask_token(section.init_from)),
            norm_before_residual=section.norm_before_residual,
        )
    )
    # A warm start overwrites it with a trained one.
    draft.embed_tokens.weight.data.copy_(load_embedding(target_dir)[: contract.vocab_size])
    set_up_vocabulary(draft, section.init_from, prompt_set, target_dir)
    dtype = compute_dtype(dtype, device)
    draft = draft.to(device, dtype)
    teacher = load_teacher(contract, target_dir, draft.t2d, dtype, mass=False)
    return PEagleStrategy(section, draft, teacher, config.trainer.seed)
