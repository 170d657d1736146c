"""Metrics that strategies share, most of them about blocks, as (numerator, denominator) pairs on the device.

Shapes: N blocks, G slots, R supervised slots (`rows`: flat n·G + j).
"""

import torch

Pairs = dict[str, tuple[torch.Tensor, torch.Tensor]]


def accuracy_metrics(
    correct_R: torch.Tensor, rows_R: torch.Tensor, num_blocks: int, block_size: int, first_slot: int, suffix: str = ""
) -> Pairs:
    """acc, acc_i (guess i of the block, from 0) and tau_greedy (1 + the leading run of right guesses, teacher-forced)."""
    device = correct_R.device
    right = torch.zeros(num_blocks * block_size, device=device)
    right[rows_R] = correct_R.float()
    seen = torch.zeros_like(right)
    seen[rows_R] = 1.0
    right_NG, seen_NG = (x.view(num_blocks, block_size)[:, first_slot:] for x in (right, seen))
    by_slot, counts = right_NG.sum(0), seen_NG.sum(0)
    pairs = {f"acc{suffix}": (by_slot.sum(), counts.sum())}
    pairs |= {f"acc{suffix}_{i}": (by_slot[i], counts[i]) for i in range(block_size - first_slot)}
    blocks = torch.full((), float(num_blocks), device=device)
    pairs[f"tau_greedy{suffix}"] = (blocks + right_NG.cumprod(1).sum(), blocks)
    return pairs


def text_acceptance(
    ce_R: torch.Tensor, rows_R: torch.Tensor, num_blocks: int, block_size: int, first_slot: int, suffix: str = ""
) -> Pairs:
    """alpha: q of the text's own token, the chance that a target which is certain of this text accepts a guess drawn from q.
    tau_prob: 1 + Σ_k Π_{u≤k} of it per block, the tokens such a round commits."""
    chance_R = torch.exp(-ce_R)
    blocks = torch.full((), float(num_blocks), device=ce_R.device)
    return {
        f"alpha{suffix}": (chance_R.sum(), torch.full_like(blocks, float(len(rows_R)))),
        f"tau_prob{suffix}": (
            blocks + chain_products(chance_R, rows_R, num_blocks, block_size, first_slot).sum(),
            blocks,
        ),
    }


def chain_products(
    values_R: torch.Tensor, rows_R: torch.Tensor, num_blocks: int, block_size: int, first_slot: int = 0
) -> torch.Tensor:
    """[N, G − first_slot]: Π_{u≤k} of the values of each block's guesses; zero from its first unsupervised slot on."""
    grid = torch.zeros(num_blocks * block_size, dtype=values_R.dtype, device=values_R.device)
    grid[rows_R] = values_R
    return grid.view(num_blocks, block_size)[:, first_slot:].cumprod(1)


def coverage_metrics(num_sequences: torch.Tensor, num_skipped: torch.Tensor) -> Pairs:
    """skipped_samples: the share in which nothing is supervised (for blocks: no two supervised tokens in a row)."""
    return {"skipped_samples": (num_skipped.float(), (num_sequences + num_skipped).float())}
