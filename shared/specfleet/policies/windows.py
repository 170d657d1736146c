"""Windows: which captured samples make the next optimizer step, and which rank trains which of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import merge
from itertools import pairwise
from typing import Literal

Order = Literal["deterministic", "arrival"]
Tail = Literal["drop", "pad", "carry"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A task that is neither terminal nor in a window. `seq` is its position in the run: epoch-major, prompt order."""

    seq: int
    epoch: int
    arrived: int = 0
    """Rises with every captured sample; 0: not captured yet."""


@dataclass(frozen=True)
class Cut:
    """Members of the next window, in training order; or, with no members, samples that the tail policy drops."""

    members: tuple[Candidate, ...] = ()
    dropped: tuple[Candidate, ...] = ()


def cut(
    captured: Sequence[Candidate],
    pending: Sequence[Candidate],
    *,
    size: int,
    order: Order,
    tail: Tail,
    next_epoch: int | None,
) -> Cut | None:
    """The next window, or None while it has to wait.

    captured: captured candidates, ascending seq; where more than `size` exist the first `size` are enough, by seq
    (deterministic) or by arrival (arrival with carry). pending: the first `size` uncaptured candidates, ascending seq.
    next_epoch: epoch of the next task that is not ingested yet; None when all are.

    deterministic: the next `size` candidates in prompt order; one missing sample holds the window back, and credits bound
    how much is captured behind it. arrival: the `size` samples that came first.
    `drop` and `pad` never let a window span two epochs; `carry` leaves only the run's last window short.
    """
    live = list(merge(captured, pending, key=lambda candidate: candidate.seq))
    if not live:
        return None
    epoch = live[0].epoch
    one_epoch = tail != "carry"
    if order == "deterministic":
        chosen = [c for c in live[:size] if not one_epoch or c.epoch == epoch]
        waiting = any(c.arrived == 0 for c in chosen)
    else:
        arrived = sorted((c for c in captured if not one_epoch or c.epoch == epoch), key=lambda c: c.arrived)
        chosen = arrived[:size]
        waiting = len(chosen) < size and any(not one_epoch or c.epoch == epoch for c in pending)
    if waiting or not chosen:
        return None
    if len(chosen) == size:
        return Cut(members=tuple(chosen))
    complete = next_epoch is None or (one_epoch and (next_epoch > epoch or live[-1].epoch > epoch))
    if not complete:
        return None
    return Cut(dropped=tuple(chosen)) if tail == "drop" else Cut(members=tuple(chosen))


def assign(num_tokens: Sequence[int], world: int, batch_size: int) -> list[list[list[int]]]:
    """Balanced assignment: [rank][micro-batch] → positions in num_tokens, each position exactly once.

    Longest first onto the rank with the fewest tokens among those with room (at most ceil(n / world) samples each): the
    classic LPT rule (Graham 1969) under a cardinality cap. Every rank gets the same number of micro-batches, unless
    it has fewer samples than that. Micro-batches hold at most batch_size samples of similar length, which keeps padding small.
    """
    total = len(num_tokens)
    room = [total // world + (rank < total % world) for rank in range(world)]
    load = [0] * world
    owned: list[list[int]] = [[] for _ in range(world)]
    for position in sorted(range(total), key=lambda p: (-num_tokens[p], p)):
        rank = min((r for r in range(world) if len(owned[r]) < room[r]), key=lambda r: (load[r], r))
        owned[rank].append(position)
        load[rank] += num_tokens[position]
    micro = -(-max(room) // batch_size)
    return [_split(positions, min(micro, len(positions))) for positions in owned]


def _split(positions: list[int], parts: int) -> list[list[int]]:
    """Cuts a length-sorted list into `parts` runs whose sizes differ by at most one."""
    if parts == 0:
        return []
    base, extra = divmod(len(positions), parts)
    bounds = [0]
    for part in range(parts):
        bounds.append(bounds[-1] + base + (part < extra))
    return [positions[a:b] for a, b in pairwise(bounds)]
