"""The P-EAGLE loss: cross entropy against the teacher's distribution, the mean over every sampled element.

There is no weight per depth: the sampled counts fall with depth, and that is the weighting. Elements whose teacher prefers a
token outside the draft vocabulary are left out of the loss, and count as wrong in the accuracy.
"""

import torch

from specfleet.drafts.peagle import PEagleDraft
from specfleet.trainer.strategies.base import Objective, Prepared
from specfleet.trainer.strategies.block_metrics import coverage_metrics
from specfleet.trainer.strategies.soft_ce import CHUNK_ROWS, Teacher, soft_ce_head

TERM = "elements"


def peagle_objective(draft: PEagleDraft, prepared: Prepared, chunk_rows: int = CHUNK_ROWS) -> Objective:
    """Forward pass and numerators of one prepared micro-batch (see PEagleStrategy.prepare for its tensors)."""
    tensors = prepared.tensors
    counts = tensors["chain_counts"].tolist()  # on the CPU: no device synchronisation
    chains, teacher_of = tensors["chains"].split(counts), tensors["teacher_of"].split(counts)
    teacher = Teacher(tensors["teacher_logits"], tensors["teacher_draft_lse"], tensors.get("teacher_full_lse"))
    outputs = draft.elements(tensors["input_ids"], tensors["aux_states"], chains)

    # Without a deep element nothing would touch the placeholder; no parameter may miss the backward pass.
    objective = Objective({TERM: 0.0 * draft.mask_hidden.float().sum()})
    device = tensors["input_ids"].device
    right = torch.zeros(len(counts), tensors["input_ids"].numel(), dtype=torch.bool, device=device)
    overlap = torch.zeros(right.shape, device=device) if teacher.full_lse_U is not None else None
    for depth, (output, rows, judge) in enumerate(zip(outputs, chains, teacher_of, strict=True)):
        live = tensors["teacher_in_vocab"][judge]
        result = soft_ce_head(draft.norm(output), draft.lm_head.weight, teacher, judge, live, chunk_rows)
        correct = draft.target_ids(result.best_R) == tensors["teacher_argmax"][judge]
        right[depth, rows] = correct
        count = torch.full((), float(len(rows)), device=device)
        objective.numerators[TERM] = objective.numerators[TERM] + result.loss
        objective.metrics[f"loss_{depth}"] = (result.loss.detach(), live.sum().float())
        objective.metrics[f"acc_{depth}"] = (correct.sum().float(), count)
        if overlap is not None and result.alpha_R is not None:
            overlap[depth, rows] = result.alpha_R.float()
            objective.metrics[f"alpha_{depth}"] = (result.alpha_R.sum().float(), count)
    # Acceptance lengths over the chains sampled to full depth: which ones those are does not depend on their content.
    full = chains[-1]
    count = torch.full((), float(len(full)), device=device)
    objective.metrics["tau_greedy"] = ((right[:, full].cummin(0).values.sum(0) + 1).sum().float(), count)
    objective.metrics |= coverage_metrics(tensors["num_sequences"], tensors["num_skipped"])
    if overlap is not None:
        objective.metrics["tau_prob"] = ((overlap[:, full].cumprod(0).sum(0) + 1).sum(), count)
    return objective
