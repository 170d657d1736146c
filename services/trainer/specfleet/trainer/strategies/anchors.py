"""Where blocks are anchored, and what their slots are to predict. CPU, no loops over samples, anchors or slots.

Shapes: B samples, T padded length, N blocks, G slots. Block n is anchored at token x_a; slot j of it stands at a + j.
"""

import torch
from torch.nn.functional import pad


def sample_anchors(
    loss_mask_BT: torch.Tensor, draws_BT: torch.Tensor, num_anchors: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Up to num_anchors positions per sample, uniformly without replacement: (sample [N], position [N], counts [B]).

    A position is eligible when it and the next one are supervised, so that the first slot has something to predict.
    loss_mask_BT: zero in padding. draws_BT: see `position_draws`; the smallest are taken. Blocks of a sample are adjacent
    and ascending.
    """
    mask = loss_mask_BT.bool()
    eligible = torch.zeros_like(mask)
    eligible[:, :-1] = mask[:, :-1] & mask[:, 1:]
    keys = torch.where(eligible, draws_BT, torch.iinfo(torch.int64).max)
    largest_taken = keys.kthvalue(min(num_anchors, mask.shape[1]), dim=1, keepdim=True).values
    chosen = eligible & (keys <= largest_taken)
    sample, position = chosen.nonzero(as_tuple=True)
    return sample, position, chosen.sum(1)


def slot_labels(
    input_ids_BT: torch.Tensor,
    loss_mask_BT: torch.Tensor,
    sample_N: torch.Tensor,
    anchor_N: torch.Tensor,
    block_size: int,
    *,
    sample_from_anchor: bool,
    contiguous: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token each slot is to predict [N, G] (0 past the end) and whether it is supervised [N, G] bool.

    Slot j predicts x_{a+j}, slot 0 nothing; with sample_from_anchor slot j predicts x_{a+j+1}. contiguous: a slot counts only
    when every earlier predicting slot does, as in decoding, where nothing behind a gap could be accepted.
    """
    # Padded by a block, the texts in a row: what the slots of a block stand for is one window of them.
    tokens, supervised = (
        pad(x, (0, block_size)).flatten().unfold(0, block_size, 1) for x in (input_ids_BT, loss_mask_BT.bool())
    )
    windows = sample_N * (input_ids_BT.shape[1] + block_size) + anchor_N + int(sample_from_anchor)
    labels, valid = tokens.index_select(0, windows), supervised.index_select(0, windows)
    if not sample_from_anchor:
        valid[:, 0] = False
    if contiguous:
        valid = contiguous_mask(valid, 0 if sample_from_anchor else 1)
    return labels, valid


def contiguous_mask(valid_NG: torch.Tensor, first_slot: int) -> torch.Tensor:
    """Drops every slot behind the first gap; slots before first_slot stay as they are."""
    result = valid_NG.clone()
    result[:, first_slot:] = valid_NG[:, first_slot:].cumprod(1, dtype=torch.uint8)
    return result


def slot_decay(block_size: int, first_slot: int, gamma: float | None) -> torch.Tensor:
    """[G] fp32: exp(−(j − first_slot)/γ), 0 before first_slot; 1 everywhere without γ. Early slots decide acceptance."""
    steps = torch.arange(block_size) - first_slot
    weights = torch.ones(block_size) if gamma is None else torch.exp(-steps.float() / gamma)
    return torch.where(steps >= 0, weights, 0.0)
