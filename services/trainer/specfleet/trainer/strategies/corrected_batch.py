"""What strategies of self-correcting block drafts (specfleet.drafts.corrected) share between batch and objective.

Shapes: N blocks of G slots, I = G − first_slot guesses per block, R supervised slots (`rows`: flat n·G + j).
"""

import torch

from specfleet.drafts.block import BlockConfig
from specfleet.drafts.corrected import CorrectedDraft


def previous_tokens(tensors: dict[str, torch.Tensor], config: BlockConfig) -> torch.Tensor:
    """[N, I]: the token before each guess, the anchor first. What lies past the end of a text is 0 and never supervised."""
    return torch.cat((tensors["anchor_ids"][:, None], tensors["labels"][:, config.first_slot : -1]), dim=1)


def guess_rows(rows_R: torch.Tensor, config: BlockConfig) -> torch.Tensor:
    """[R]: the supervised slots as flat n·I + i."""
    slots, first = config.block_size, config.first_slot
    return rows_R // slots * (slots - first) + rows_R % slots - first


def run_blocks(draft: CorrectedDraft, tensors: dict[str, torch.Tensor], embedding_VH: torch.Tensor) -> torch.Tensor:
    """The backbone's output for the guessing slots [N, I, H]."""
    context = draft.context(tensors["context_states"], tensors["context_positions"])
    hidden = draft.blocks(context, tensors["anchors"], tensors["anchor_ids"], tensors["starts"], embedding_VH)
    return hidden[:, draft.config.first_slot :]
