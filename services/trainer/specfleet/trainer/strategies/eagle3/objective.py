"""The EAGLE-3 loss: per rollout step the cross entropy against the teacher's distribution over the draft vocabulary.

Every row whose teacher prefers a token outside the draft vocabulary is left out of the loss, but counts as wrong in the
accuracy. Terms are `step_i`; the loop divides by the supervised rows of the whole optimizer step.
"""

from collections.abc import Sequence

import torch

from specfleet.drafts.eagle3 import Eagle3Draft
from specfleet.trainer.strategies.base import Objective, Prepared
from specfleet.trainer.strategies.soft_ce import CHUNK_ROWS, Teacher, soft_ce_head


def step_name(step: int) -> str:
    return f"step_{step}"


def eagle3_objective(
    draft: Eagle3Draft, embedding_VH: torch.Tensor, prepared: Prepared, steps: int, chunk_rows: int = CHUNK_ROWS
) -> Objective:
    """Forward pass and numerators of one prepared micro-batch (see Eagle3Strategy.prepare for its tensors)."""
    tensors = prepared.tensors
    rows = _split(tensors["rows"], tensors["row_counts"])
    active = _split(tensors["active"], tensors["active_counts"])
    teacher_of = _split(tensors["teacher_of"], tensors["row_counts"])
    teacher = Teacher(tensors["teacher_logits"], tensors["teacher_draft_lse"])
    outputs = draft.rollout(tensors["input_ids"], tensors["aux_states"], embedding_VH, active)

    objective = Objective({})
    right = torch.zeros(steps, tensors["input_ids"].numel(), dtype=torch.bool, device=tensors["input_ids"].device)
    for step, (output, index, judge) in enumerate(zip(outputs, rows, teacher_of, strict=True)):
        chosen = output if len(index) == len(active[step]) else output[torch.searchsorted(active[step], index)]
        live = tensors["teacher_in_vocab"][judge]
        loss, guess = soft_ce_head(draft.norm(chosen), draft.lm_head.weight, teacher, judge, live, chunk_rows)
        correct = draft.target_ids(guess) == tensors["teacher_argmax"][judge]
        right[step, index] = correct
        name = step_name(step)
        objective.numerators[name] = loss
        objective.metrics[f"loss_{step}"] = (loss.detach(), prepared.denominators[name])
        objective.metrics[f"acc_{step}"] = (correct.sum().float(), _count(index, output))
    first = rows[0]
    # A rollout is worth its leading run of correct guesses plus the token the target adds itself.
    accepted = right[:, first].cummin(0).values.sum(0)
    objective.metrics["tau_greedy"] = ((accepted + 1).sum().float(), _count(first, outputs[0]))
    return objective


def _split(values: torch.Tensor, counts_S: torch.Tensor) -> Sequence[torch.Tensor]:
    return values.split(counts_S.tolist())  # counts stay on the CPU: no device synchronisation


def _count(index: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(float(len(index)), device=like.device)
