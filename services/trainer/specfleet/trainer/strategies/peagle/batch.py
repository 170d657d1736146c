"""Which elements (anchor row, depth) a micro-batch trains: chain-of-depth sampling.

Training every depth of every row would multiply the tokens by the number of depths. Instead a falling share of the chains
goes one deeper, and a chain goes deeper only from a depth it has reached, so that each element finds its whole chain.
"""

from collections.abc import Sequence

import torch

from specfleet.trainer.strategies.draws import Words, position_draws
from specfleet.trainer.strategies.eagle3 import batch as eagle3_batch


def collate(
    samples: Sequence[dict[str, torch.Tensor]],
    seeds_B: Words,
    depths: int,
    align: eagle3_batch.MaskAlign,
    keep_ratio: float,
    keep_ratio_min: float,
) -> dict[str, torch.Tensor]:
    """One micro-batch, as EAGLE-3's with elements for rows.

    Depth d of anchor a is judged like step d of a rollout from row a, so the same rows are supervised. chains [ΣR_d]: flat
    anchors b·T + a of every sampled element, depth after depth · teacher_of [ΣR_d] · chain_counts [D] · input_ids,
    aux_states, teacher_states, teacher_argmax, teacher_lse, num_tokens, num_loss_tokens: see there. seeds: `visit_seeds`.
    """
    batch = eagle3_batch.collate(samples, depths, align)
    padded = batch["input_ids"].shape[1]
    # The draw of position t and depth d stays the same whatever the sample is padded to.
    draws = position_draws(seeds_B, padded * depths).view(-1, depths)
    rows = batch.pop("rows").split(batch.pop("row_counts").tolist())
    judges = batch.pop("teacher_of").split([len(anchors) for anchors in rows])
    kept = sample_chains(rows, draws.T, padded, keep_ratio, keep_ratio_min)
    del batch["active"], batch["active_counts"]
    return {
        **batch,
        "chains": torch.cat([anchors[index] for anchors, index in zip(rows, kept, strict=True)]),
        "teacher_of": torch.cat([judge[index] for judge, index in zip(judges, kept, strict=True)]),
        "chain_counts": torch.tensor([len(index) for index in kept]),
    }


def sample_chains(
    rows: Sequence[torch.Tensor], draws_DR: torch.Tensor, padded: int, keep_ratio: float, keep_ratio_min: float
) -> list[torch.Tensor]:
    """Per depth, indices into rows[d] of the chains that are kept, ascending. CPU.

    rows[d]: flat anchors b·padded + a supervised at depth d, ascending (so no chain leaves its sample or wraps around its
    end). Depth 0 keeps all. At depth d a sample with n anchors at depth 0 keeps ⌊(n − d)·max(keep_ratio**d, keep_ratio_min)⌋
    of its candidates: those supervised there and, from depth 2 on, kept at depth d − 1. The ones with the smallest draws
    [depth, flat anchor] are kept, so independent uniform draws make it sampling without replacement.
    """
    flat = draws_DR.shape[1]
    samples = -(-flat // padded)
    supervised = torch.bincount(rows[0] // padded, minlength=samples)
    reached = torch.ones(flat, dtype=torch.bool)
    kept = [torch.arange(len(rows[0]))]
    for depth in range(1, len(rows)):
        candidates = reached[rows[depth]].nonzero().flatten()
        anchors = rows[depth][candidates]
        count = torch.bincount(anchors // padded, minlength=samples)
        share = max(keep_ratio**depth, keep_ratio_min)
        # The margin keeps a product such as 10 · 0.7 from falling below the integer it is.
        quota = ((supervised - depth).clamp_min(0).double() * share + 1e-9).floor().long().minimum(count)
        # By sample, and within it by draw.
        order = torch.argsort(draws_DR[depth, anchors])
        order = order[torch.argsort(anchors[order] // padded, stable=True)]
        sample = anchors[order] // padded
        rank = torch.arange(len(order)) - (count.cumsum(0) - count)[sample]
        chosen = candidates[order[rank < quota[sample]]].sort().values
        kept.append(chosen)
        reached = torch.zeros(flat, dtype=torch.bool)
        reached[rows[depth][chosen]] = True
    return kept
