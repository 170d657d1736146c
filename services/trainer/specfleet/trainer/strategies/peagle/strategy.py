"""Assembles the P-EAGLE strategy: draft, frozen teacher, sampled chains, objective."""

from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from specfleet.config.models import PEagleSection, RunConfig
from specfleet.contracts.errors import ConfigError
from specfleet.drafts.mask_token import resolve_mask_token
from specfleet.drafts.peagle import PEagleConfig, PEagleDraft
from specfleet.target.dtypes import compute_dtype
from specfleet.target.weights import load_embedding, read_text_config
from specfleet.trainer.strategies.base import Objective, Prepared, Strategy
from specfleet.trainer.strategies.eagle3.batch import collate
from specfleet.trainer.strategies.eagle_setup import check_final_state, draft_sizes, load_teacher, set_up_vocabulary
from specfleet.trainer.strategies.peagle.batch import sample_chains
from specfleet.trainer.strategies.peagle.objective import TERM, peagle_objective
from specfleet.trainer.strategies.soft_ce import CHUNK_ROWS
from specfleet.trainer.strategies.teacher import FrozenTeacher
from specfleet.wire.records_pb2 import CaptureContract

if TYPE_CHECKING:
    from specfleet.data.prompt_set import PromptSet


class PEagleStrategy(Strategy):
    """One term: the mean over sampled elements."""

    def __init__(self, section: PEagleSection, draft: PEagleDraft, teacher: FrozenTeacher) -> None:
        self.draft = draft
        self.term_weights = {TERM: 1.0}
        self.chunk_rows = CHUNK_ROWS
        self._section = section
        self._teacher = teacher

    def collate(self, samples: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        # Depth d of anchor a is fed nothing beyond x_{a+1} and judged like step d of an EAGLE-3 rollout from row a.
        batch = collate(samples, self._section.num_depths, self._section.mask_align)
        return {name: tensor for name, tensor in batch.items() if name not in ("active", "active_counts")}

    @torch.no_grad()
    def prepare(self, batch: dict[str, torch.Tensor]) -> Prepared:
        """Adds chains, teacher_of [ΣR_d] and chain_counts [D]: the sampled elements, depth after depth.

        Sampled here and not in the prefetch thread, so that a run restarted from a checkpoint draws the same again.
        """
        section, device = self._section, self.draft.fc.weight.device
        counts = batch["row_counts"].tolist()
        rows, judges = batch["rows"].split(counts), batch["teacher_of"].split(counts)
        kept = sample_chains(rows, batch["input_ids"].shape[1], section.keep_ratio, section.keep_ratio_min)
        sampled = {
            "input_ids": batch["input_ids"],
            "aux_states": batch["aux_states"],
            "chains": torch.cat([anchors[index] for anchors, index in zip(rows, kept, strict=True)]),
            "teacher_of": torch.cat([judge[index] for judge, index in zip(judges, kept, strict=True)]),
        }
        tensors = {name: x.to(device, non_blocking=True) for name, x in sampled.items()}
        captured = {
            name: batch[name].to(device, non_blocking=True)
            for name in ("teacher_argmax", "teacher_lse")
            if name in batch
        }
        states = batch["teacher_states"].to(device, non_blocking=True)
        judgement = self._teacher.judge(states, captured, mass=False)
        in_vocab = self.draft.t2d[judgement.argmax_U]
        tensors.update(
            teacher_logits=judgement.teacher.logits_UV,
            teacher_draft_lse=judgement.teacher.lse_U,
            teacher_argmax=judgement.argmax_U,
            teacher_in_vocab=in_vocab,
            chain_counts=torch.tensor([len(index) for index in kept]),
        )
        if judgement.teacher.full_lse_U is not None:
            tensors["teacher_full_lse"] = judgement.teacher.full_lse_U
        return Prepared(
            tensors=tensors,
            denominators={TERM: in_vocab[tensors["teacher_of"]].sum().float()},
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
    if not isinstance(section, PEagleSection):
        raise ConfigError("SF-CONFIG-STRATEGY", f"build_peagle was given the section of {section.name}")
    check_final_state("peagle", contract)
    draft = PEagleDraft(
        PEagleConfig(
            **draft_sizes(section, contract, read_text_config(target_dir)),
            num_layers=section.num_layers,
            num_depths=section.num_depths,
            mask_token_id=resolve_mask_token(section.mask_token_id, target_dir),
            norm_before_residual=section.norm_before_residual,
        )
    )
    # A warm start overwrites it with a trained one.
    draft.embed_tokens.weight.data.copy_(load_embedding(target_dir)[: contract.vocab_size])
    set_up_vocabulary(draft, section.init_from, prompt_set, target_dir)
    dtype = compute_dtype(dtype, device)
    draft = draft.to(device, dtype)
    return PEagleStrategy(section, draft, load_teacher(contract, target_dir, draft.t2d, dtype, mass=False))
