"""Which elements (anchor row, depth) a micro-batch trains: chain-of-depth sampling.

Training every depth of every row would multiply the tokens by the number of depths. Instead a falling share of the chains
goes one deeper, and a chain goes deeper only from a depth it has reached, so that each element finds its whole chain.
"""

from collections.abc import Sequence

import torch


def sample_chains(
    rows: Sequence[torch.Tensor],
    padded: int,
    keep_ratio: float,
    keep_ratio_min: float,
    generator: torch.Generator | None = None,
) -> list[torch.Tensor]:
    """Per depth, indices into rows[d] of the chains that are kept, ascending. CPU.

    rows[d]: flat anchors b·padded + a supervised at depth d, ascending (so no chain leaves its sample or wraps around its
    end). Depth 0 keeps all. At depth d a sample with n anchors at depth 0 keeps ⌊(n − d)·max(keep_ratio**d, keep_ratio_min)⌋
    of its candidates, drawn uniformly without replacement: those supervised there and, from depth 2 on, kept at depth d − 1.
    generator: torch's own when None.
    """
    kept = [torch.arange(len(rows[0]))]
    if not sum(map(len, rows)):
        return [torch.arange(0) for _ in rows]
    flat = 1 + max(int(anchors[-1]) for anchors in rows if len(anchors))
    samples = 1 + flat // padded
    supervised = torch.bincount(rows[0] // padded, minlength=samples)
    reached = torch.ones(flat, dtype=torch.bool)
    for depth in range(1, len(rows)):
        candidates = reached[rows[depth]].nonzero().flatten()
        sample = rows[depth][candidates] // padded
        count = torch.bincount(sample, minlength=samples)
        share = max(keep_ratio**depth, keep_ratio_min)
        # The margin keeps a product such as 10 · 0.7 from falling below the integer it is.
        quota = ((supervised - depth).clamp_min(0) * share + 1e-9).floor().long().minimum(count)
        # A random order within each sample: sorted by sample, then by a random number.
        order = torch.argsort(sample + 0.5 * torch.rand(len(candidates), dtype=torch.float64, generator=generator))
        rank = torch.arange(len(candidates)) - (count.cumsum(0) - count)[sample]
        chosen = candidates[order[rank < quota[sample]]].sort().values
        kept.append(chosen)
        reached = torch.zeros(flat, dtype=torch.bool)
        reached[rows[depth][chosen]] = True
    return kept
