"""Assembles the EAGLE-3 strategy: draft, frozen teacher, batch, objective."""

from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from specfleet.config.models import RunConfig
from specfleet.config.strategies import Eagle3Section
from specfleet.drafts.eagle3 import Eagle3Config, Eagle3Draft
from specfleet.target.dtypes import compute_dtype
from specfleet.target.weights import load_embedding, load_raw_head, read_text_config
from specfleet.trainer.strategies.base import Objective, Prepared, Strategy
from specfleet.trainer.strategies.eagle3.batch import collate
from specfleet.trainer.strategies.eagle3.objective import eagle3_objective, step_name
from specfleet.trainer.strategies.eagle3.schedule import rollout_length
from specfleet.trainer.strategies.eagle_setup import (
    check_final_state,
    draft_sizes,
    judged,
    load_teacher,
    set_up_vocabulary,
)
from specfleet.trainer.strategies.soft_ce import Lk, chunk_rows
from specfleet.trainer.strategies.teacher import FrozenTeacher
from specfleet.wire.records_pb2 import CaptureContract

if TYPE_CHECKING:
    from specfleet.data.prompt_set import PromptSet


class Eagle3Strategy(Strategy):
    """term_weights: step_i → step_decay**i. Each term is a mean over the supervised rows of its step."""

    draft: Eagle3Draft

    def __init__(
        self,
        section: Eagle3Section,
        draft: Eagle3Draft,
        embedding_VH: torch.Tensor,
        teacher: FrozenTeacher,
        head_VH: torch.Tensor | None = None,
        total_steps: int = 1,
    ) -> None:
        """head_VH: the target's output head, for drafts without one of their own."""
        self.draft = draft
        self.term_weights = {step_name(i): section.step_decay**i for i in range(section.ttt_length)}
        self.chunk_rows = chunk_rows(draft.config.draft_vocab_size, draft.fc.weight.device)
        self._section = section
        self._embedding = embedding_VH
        self._head = head_VH
        self._teacher = teacher
        self._total_steps = total_steps
        self._lk = Lk(section.lk, section.lk_scale, section.lk_decay, section.lk_lambda == "token")

    def collate(self, samples: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        return collate(samples, self._section.ttt_length, self._section.mask_align)

    @torch.no_grad()
    def prepare(self, batch: dict[str, torch.Tensor]) -> Prepared:
        section = self._section
        batch = _first_steps(
            batch, rollout_length(section.ttt_schedule, section.ttt_length, self.step, self._total_steps)
        )
        tensors = judged(batch, self._teacher, self.draft.t2d, mass=section.lk != "none")
        in_vocab = tensors["teacher_in_vocab"]
        judges = tensors["teacher_of"].split(batch["row_counts"].tolist())
        denominators = {name: torch.zeros((), device=in_vocab.device) for name in self.term_weights}
        denominators |= {step_name(i): in_vocab[judge].sum().float() for i, judge in enumerate(judges)}
        return Prepared(
            tensors=tensors,
            denominators=denominators,
            num_tokens=int(batch["num_tokens"]),
            num_loss_tokens=int(batch["num_loss_tokens"]),
        )

    def objective(self, prepared: Prepared) -> Objective:
        return eagle3_objective(self.draft, self._embedding, prepared, self._head, self._lk, self.chunk_rows)

    def identity(self) -> dict[str, str]:
        config, section = self.draft.config, self._section
        facts = {
            "strategy": section.name,
            "layers": ",".join(map(str, config.layer_ids)),
            "draft_vocab_size": str(config.draft_vocab_size),
            "draft_vocab": sha256(self.draft.d2t.cpu().numpy().tobytes()).hexdigest(),
            "intermediate_size": str(config.intermediate_size),
            "ttt_length": str(section.ttt_length),
            "step_decay": str(section.step_decay),
            "mask_align": section.mask_align,
        }
        for name in ("head", "ttt_schedule", "fc_norm", "norm_output", "legacy_v030", "lk", "experts"):
            facts[name] = str(getattr(section, name))
        if section.lk == "lambda":
            facts["lk_lambda"] = f"{section.lk_scale}·exp(-{section.lk_decay}·α) per {section.lk_lambda}"
        if section.experts:
            facts["experts_per_token"] = str(section.experts_per_token)
        return facts


def _first_steps(batch: dict[str, torch.Tensor], steps: int) -> dict[str, torch.Tensor]:
    """The batch with its first rollout steps only."""
    if steps == len(batch["row_counts"]):
        return batch
    rows, active = batch["row_counts"][:steps], batch["active_counts"][:steps]
    num_rows, num_active = int(rows.sum()), int(active.sum())
    return {
        **batch,
        "row_counts": rows,
        "active_counts": active,
        "rows": batch["rows"][:num_rows],
        "teacher_of": batch["teacher_of"][:num_rows],
        "active": batch["active"][:num_active],
    }


def build_eagle3(
    config: RunConfig,
    contract: CaptureContract,
    target_dir: Path,
    prompt_set: "PromptSet",
    total_steps: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Eagle3Strategy:
    """Draft initialised from torch's global generator; vocabulary from the supervised tokens of the prompt set."""
    section = config.strategy
    assert isinstance(section, Eagle3Section)
    check_final_state("eagle3", contract)
    draft = Eagle3Draft(
        Eagle3Config(
            **draft_sizes(section, contract, read_text_config(target_dir)),
            fc_norm=section.fc_norm,
            norm_output=section.norm_output,
            legacy_v030=section.legacy_v030,
            own_head=section.head == "own",
            experts=section.experts,
            experts_per_token=section.experts_per_token,
        )
    )
    set_up_vocabulary(draft, section.init_from, prompt_set, target_dir)
    dtype = compute_dtype(dtype, device)
    draft = draft.to(device, dtype)
    teacher = load_teacher(contract, target_dir, draft.t2d, dtype, mass=section.lk != "none")
    # The raw head: engines multiply the draft's states with it, without the target's own logits scale.
    head = None if draft.config.own_head else load_raw_head(target_dir)[: contract.vocab_size].to(device, dtype)
    embedding = load_embedding(target_dir).to(device, dtype)
    return Eagle3Strategy(section, draft, embedding, teacher, head, total_steps)
