"""The Domino loss: cross entropy of corrected logits, and with a fading weight λ that of the backbone's own.

Both are means over the same slots, so they are one term. Metrics with the suffix _base are the backbone's alone.
"""

import torch

from specfleet.drafts.domino import DominoDraft
from specfleet.trainer.strategies.base import Objective, Prepared
from specfleet.trainer.strategies.block_metrics import accuracy_metrics, coverage_metrics, text_acceptance
from specfleet.trainer.strategies.corrected_batch import guess_rows, previous_tokens, run_blocks
from specfleet.trainer.strategies.corrected_ce import corrected_ce_head

TERM = "ce"


def domino_objective(
    draft: DominoDraft, embedding_VH: torch.Tensor, head_VH: torch.Tensor, prepared: Prepared, base_weight: float
) -> Objective:
    """Forward pass and numerator of one prepared micro-batch (see `domino.batch.collate` for its tensors)."""
    tensors, config = prepared.tensors, draft.config
    hidden_NIH = run_blocks(draft, tensors, embedding_VH)
    rows, guesses = tensors["rows"], guess_rows(tensors["rows"], config)
    codes = None
    if base_weight < 1 and len(rows):
        codes = draft.codes(hidden_NIH, previous_tokens(tensors, config), embedding_VH).flatten(0, 1)[guesses]
    elif base_weight < 1:
        codes = hidden_NIH.new_zeros(0, config.embedding_size)  # CUDA's recurrence refuses a batch of none
    labels = tensors["labels"].flatten()[rows]
    result = corrected_ce_head(
        hidden_NIH.flatten(0, 1)[guesses], head_VH, codes, draft.correction_VE, labels, tensors["weights"],
        tensors["row_bounds"].tolist(), base_weight,
    )  # fmt: skip
    # Keeps the parameters of a skipped correction in the graph, with a gradient of zero.
    loss = result.loss + sum(
        p.flatten()[:0].sum() for p in (*draft.prefix_gru.parameters(), *draft.embed_proj.parameters())
    )
    one = torch.ones((), device=loss.device)
    blocks = (len(hidden_NIH), config.block_size, config.first_slot)
    metrics = {
        "base_weight": (base_weight * one, one),
        **coverage_metrics(tensors["num_sequences"], tensors["num_skipped"]),
    }
    for part, suffix in ((result.final, ""), (result.base, "_base")):
        if part is not None:
            correct = part.best_R == labels
            metrics[f"ce{suffix}"] = (part.ce_R.sum(), len(rows) * one)
            metrics |= accuracy_metrics(correct, rows, *blocks, suffix)
            metrics |= text_acceptance(part.ce_R, rows, *blocks, suffix)
    return Objective(numerators={TERM: loss}, metrics=metrics)
