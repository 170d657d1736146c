"""What the strategies of the EAGLE family (eagle3, peagle) set up alike: sizes, draft vocabulary, frozen teacher, warm start."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from specfleet.config.strategies import Eagle3Section, PEagleSection
from specfleet.contracts.errors import ConfigError
from specfleet.drafts.eagle3 import Eagle3Draft
from specfleet.drafts.peagle import PEagleDraft
from specfleet.drafts.sizes import decoder_sizes
from specfleet.drafts.warm_start import warm_start
from specfleet.target.weights import load_head
from specfleet.trainer.strategies.teacher import FrozenTeacher, needs_full_head
from specfleet.wire.records_pb2 import CaptureContract

if TYPE_CHECKING:
    from specfleet.data.prompt_set import PromptSet


def draft_sizes(
    section: Eagle3Section | PEagleSection, contract: CaptureContract, text_config: dict[str, Any]
) -> dict[str, Any]:
    """Configuration keys shared by the family's drafts."""
    return {
        **decoder_sizes(text_config, section.intermediate_size),
        "vocab_size": contract.vocab_size,
        "draft_vocab_size": min(section.draft_vocab_size or contract.vocab_size, contract.vocab_size),
        "target_hidden_size": contract.hidden_size,
        "layer_ids": tuple(contract.layers),
    }


def check_final_state(name: str, contract: CaptureContract) -> None:
    """Raises ConfigError SF-CONFIG-FINAL-STATE."""
    if contract.final_state != "post_norm":
        raise ConfigError(
            "SF-CONFIG-FINAL-STATE", f"{name} needs final_state post_norm, the contract says {contract.final_state!r}"
        )


def set_up_vocabulary(
    draft: Eagle3Draft | PEagleDraft, init_from: str, prompt_set: "PromptSet", target_dir: Path
) -> None:
    """Gives a fresh draft its vocabulary, and its weights when it starts from an exported draft.

    A warm start brings its own vocabulary, since its head's rows belong to it. Otherwise the draft knows the most frequent
    supervised tokens of the prompt set, and always the target's stop tokens: a draft that cannot end drafts past the end.
    """
    from specfleet.data.vocab import build_vocab_map, count_loss_tokens
    from specfleet.target.facts import read_text_facts

    config = draft.config
    if init_from:
        warm_start(draft, init_from)
    elif config.draft_vocab_size < config.vocab_size:
        stops = [token for token in read_text_facts(target_dir).eos_token_ids if token < config.vocab_size]
        mapping = build_vocab_map(count_loss_tokens(prompt_set, config.vocab_size), config.draft_vocab_size, stops)
        draft.set_vocabulary(torch.from_numpy(mapping.d2t), torch.from_numpy(mapping.t2d))


def load_teacher(
    contract: CaptureContract, target_dir: Path, t2d: torch.Tensor, dtype: torch.dtype, *, mass: bool
) -> FrozenTeacher:
    """On t2d's device. mass: see `FrozenTeacher.judge`."""
    # Rows beyond the vocabulary are padding of the checkpoint and must never win the argmax.
    head = load_head(target_dir)[: contract.vocab_size].to(t2d.device, dtype)
    return FrozenTeacher(head, t2d.nonzero().flatten(), full=needs_full_head(contract.extras, mass=mass))


_ON_HOST = frozenset({"row_counts", "active_counts", "chain_counts", "num_tokens", "num_loss_tokens"})


@torch.no_grad()
def judged(
    batch: dict[str, torch.Tensor], teacher: FrozenTeacher, t2d: torch.Tensor, *, mass: bool
) -> dict[str, torch.Tensor]:
    """The batch on t2d's device (counts stay on the CPU: no micro-batch waits for the device), with the teacher's verdict.

    In place of teacher_states: teacher_logits [U, V_d], teacher_draft_lse [U], teacher_argmax [U] (target ids), teacher_in_vocab
    [U] bool, and teacher_full_lse [U] where it is known. mass: see `FrozenTeacher.judge`.
    """
    tensors = {name: x if name in _ON_HOST else x.to(t2d.device, non_blocking=True) for name, x in batch.items()}
    judgement = teacher.judge(tensors.pop("teacher_states"), tensors, mass=mass)
    tensors.update(
        teacher_logits=judgement.teacher.logits_UV,
        teacher_draft_lse=judgement.teacher.lse_U,
        teacher_argmax=judgement.argmax_U,
        teacher_in_vocab=t2d[judgement.argmax_U],
    )
    if judgement.teacher.full_lse_U is not None:
        tensors["teacher_full_lse"] = judgement.teacher.full_lse_U
    return tensors
