"""The DSpark loss: (a·Σw·CE + b·Σw·L1)/Σw over supervised slots, and the confidence's cross entropy with the true acceptance.

The acceptance is a target, not a path: no gradient flows into it. The confidence's own gradient does reach the backbone and
the Markov embedding. Shapes: N blocks, G slots, R supervised slots.
"""

import torch
from torch.nn import functional

from specfleet.drafts.dspark import DSparkDraft
from specfleet.trainer.strategies.base import Objective, Prepared
from specfleet.trainer.strategies.block_metrics import Pairs, accuracy_metrics, chain_products, coverage_metrics
from specfleet.trainer.strategies.corrected_batch import guess_rows, previous_tokens, run_blocks
from specfleet.trainer.strategies.dspark.head import Judged, TeacherRows, judged_head

SLOTS, CONFIDENCE = "slots", "confidence"


def dspark_objective(
    draft: DSparkDraft,
    embedding_VH: torch.Tensor,
    head_VH: torch.Tensor,
    prepared: Prepared,
    ce_weight: float,
    l1_weight: float,
) -> Objective:
    """Forward pass and numerators of one prepared micro-batch (see `dspark.batch.collate` for its tensors)."""
    tensors, config = prepared.tensors, draft.config
    hidden_NIH = run_blocks(draft, tensors, embedding_VH)
    rows, guesses = tensors["rows"], guess_rows(tensors["rows"], config)
    previous_NI = previous_tokens(tensors, config)
    x_RH = hidden_NIH.flatten(0, 1)[guesses]
    labels, weights = tensors["labels"].flatten()[rows], tensors["weights"]
    teacher = TeacherRows(
        tensors["teacher_states"], tensors["teacher_of"],
        tensors["row_bounds"].tolist(), tensors["teacher_bounds"].tolist(),
    )  # fmt: skip
    codes = draft.codes(hidden_NIH, previous_NI, embedding_VH).flatten(0, 1)[guesses]
    judged = judged_head(x_RH, head_VH, codes, draft.correction_VE, labels, weights, teacher, ce_weight, l1_weight)
    blocks, slots = hidden_NIH.shape[:2]
    objective = Objective(
        numerators={SLOTS: judged.loss},
        metrics={
            **teacher_metrics(judged, rows, blocks, slots),
            **accuracy_metrics(judged.best_R == labels, rows, blocks, slots, config.first_slot),
            **coverage_metrics(tensors["num_sequences"], tensors["num_skipped"]),
        },
    )
    if config.confidence_head:
        logits = draft.confidence(x_RH, previous_NI.flatten()[guesses])
        loss_R = confidence_loss(logits, judged.acceptance_R)
        objective.numerators[CONFIDENCE] = (weights * loss_R).sum()
        objective.metrics |= confidence_metrics(
            logits.detach(), loss_R.detach(), judged.acceptance_R, rows, blocks, slots
        )
    return objective


def confidence_loss(logits_R: torch.Tensor, acceptance_R: torch.Tensor) -> torch.Tensor:
    """[R]: binary cross entropy of the estimated with the true acceptance."""
    return functional.binary_cross_entropy_with_logits(logits_R.to(acceptance_R.dtype), acceptance_R, reduction="none")


def teacher_metrics(judged: Judged, rows_R: torch.Tensor, blocks: int, slots: int) -> Pairs:
    """tau_prob: 1 + Σ_k Π_{u≤k} α_u per block, the tokens one round of lossless sampling commits on this text."""
    one = torch.ones((), device=rows_R.device)
    count, alpha = len(rows_R) * one, judged.acceptance_R
    slot, seen = rows_R % slots, torch.zeros(slots, dtype=judged.ce_R.dtype, device=rows_R.device)
    by_slot = seen.index_add(0, slot, judged.ce_R)
    counts = seen.index_add(0, slot, torch.ones_like(judged.ce_R))
    return {
        "ce": (judged.ce_R.sum(), count),
        "l1": (judged.l1_R.sum(), count),
        "alpha": (alpha.sum(), count),
        "teacher_agreement": ((judged.best_R == judged.teacher_best_R).sum().float(), count),
        "draft_top1": (judged.top_R.sum(), count),
        "teacher_top1": (judged.teacher_top_R.sum(), count),
        "tau_prob": (blocks * one + chain_products(alpha, rows_R, blocks, slots).sum(), blocks * one),
        **{f"ce_{k}": (by_slot[k], counts[k]) for k in range(slots)},
    }


def confidence_metrics(
    logits_R: torch.Tensor,
    loss_R: torch.Tensor,
    acceptance_R: torch.Tensor,
    rows_R: torch.Tensor,
    blocks: int,
    slots: int,
) -> Pairs:
    """confidence_bias, confidence_chain_bias: estimate minus truth, of single slots and of the products along a block."""
    count = torch.full((), float(len(rows_R)), device=rows_R.device)
    chance_R = torch.sigmoid(logits_R.to(acceptance_R.dtype))
    chains = (chain_products(x, rows_R, blocks, slots).sum() for x in (chance_R, acceptance_R))
    return {
        "confidence_loss": (loss_R.sum(), count),
        "confidence_error": ((chance_R - acceptance_R).abs().sum(), count),
        "confidence_bias": ((chance_R - acceptance_R).sum(), count),
        "confidence_chain_bias": (next(chains) - next(chains), count),
    }
