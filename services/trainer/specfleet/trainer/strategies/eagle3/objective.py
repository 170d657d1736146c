"""The EAGLE-3 loss: per rollout step a loss against the teacher's distribution over the draft vocabulary.

Every row whose teacher prefers a token outside the draft vocabulary is left out of the loss, but counts as wrong in the
accuracy and with its true overlap in α. Terms are `step_i`; the loop divides by the rows of the whole optimizer step.
"""

from collections.abc import Sequence

import torch

from specfleet.drafts.eagle3 import Eagle3Draft
from specfleet.trainer.strategies.base import Objective, Prepared
from specfleet.trainer.strategies.block_metrics import coverage_metrics
from specfleet.trainer.strategies.soft_ce import CHUNK_ROWS, Lk, Teacher, soft_ce_head


def step_name(step: int) -> str:
    return f"step_{step}"


def eagle3_objective(
    draft: Eagle3Draft,
    embedding_VH: torch.Tensor,
    prepared: Prepared,
    head_VH: torch.Tensor | None = None,
    lk: Lk | None = None,
    chunk_rows: int = CHUNK_ROWS,
) -> Objective:
    """Forward pass and numerators of one prepared micro-batch (see Eagle3Strategy.prepare for its tensors).

    Terms of steps beyond this micro-batch's rollout are zero, as their denominators are.
    """
    tensors = prepared.tensors
    rows = _split(tensors["rows"], tensors["row_counts"])
    active = _split(tensors["active"], tensors["active_counts"])
    teacher_of = _split(tensors["teacher_of"], tensors["row_counts"])
    teacher = Teacher(tensors["teacher_logits"], tensors["teacher_draft_lse"], tensors.get("teacher_full_lse"))
    outputs = draft.rollout(tensors["input_ids"], tensors["aux_states"], embedding_VH, active)
    head = draft.head(head_VH)

    device = tensors["input_ids"].device
    objective = Objective({name: torch.zeros((), device=device) for name in prepared.denominators})
    right = torch.zeros(len(rows), tensors["input_ids"].numel(), dtype=torch.bool, device=device)
    overlap = torch.zeros(right.shape, device=device) if teacher.full_lse_U is not None else None
    for step, (output, index, judge) in enumerate(zip(outputs, rows, teacher_of, strict=True)):
        chosen = output if len(index) == len(active[step]) else output[torch.searchsorted(active[step], index)]
        live = tensors["teacher_in_vocab"][judge]
        result = soft_ce_head(draft.head_input(chosen), head, teacher, judge, live, chunk_rows, lk)
        correct = draft.target_ids(result.best_R) == tensors["teacher_argmax"][judge]
        right[step, index] = correct
        name = step_name(step)
        objective.numerators[name] = result.loss
        objective.metrics[f"loss_{step}"] = (result.loss.detach(), prepared.denominators[name])
        objective.metrics[f"acc_{step}"] = (correct.sum().float(), _count(index, output))
        if overlap is not None and result.alpha_R is not None:
            overlap[step, index] = result.alpha_R.float()
            objective.metrics[f"alpha_{step}"] = (result.alpha_R.sum().float(), _count(index, output))
    first, count = rows[0], _count(rows[0], outputs[0])
    # A rollout is worth its leading run of correct guesses plus the token the target adds itself; under lossless sampling,
    # the products of the chances that its guesses are accepted.
    objective.metrics["tau_greedy"] = ((right[:, first].cummin(0).values.sum(0) + 1).sum().float(), count)
    objective.metrics |= coverage_metrics(tensors["num_sequences"], tensors["num_skipped"])
    if overlap is not None:
        objective.metrics["tau_prob"] = ((overlap[:, first].cumprod(0).sum(0) + 1).sum(), count)
    return objective


def _split(values: torch.Tensor, counts_S: torch.Tensor) -> Sequence[torch.Tensor]:
    return values.split(counts_S.tolist())  # counts stay on the CPU: no device synchronisation


def _count(index: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return torch.full((), float(len(index)), device=like.device)
