"""Random draws that belong to a visit of a sample, not to a batch or a rank.

What a sample draws depends on the run's seed, its task (epoch and prompt) and the position drawn for: not on padding, batch
mates, world size, or how often a run was resumed. So a restarted run repeats the draws of an uninterrupted one.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

Words = npt.NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def visit_seeds(samples: Sequence[dict[str, torch.Tensor]], seed: int) -> Words:
    """[B] one per sample, from its `visit` (epoch, prompt index; see the loader). Samples without one share visit (0, 0)."""
    visits = [sample["visit"].tolist() if "visit" in sample else [0, 0] for sample in samples]
    words = np.array(visits, dtype=np.int64).reshape(-1, 2).astype(np.uint64)
    with np.errstate(over="ignore"):
        state = _mix(np.full(len(words), seed, dtype=np.int64).astype(np.uint64) + _GOLDEN)
        for column in range(2):
            state = _mix((state ^ words[:, column]) + _GOLDEN)
    return state


def position_draws(seeds_B: Words, length: int) -> torch.Tensor:
    """[B, length] int64, independent and uniform over 0 … 2⁶³ − 1: position t of sample b draws the same at any length."""
    with np.errstate(over="ignore"):
        counters = np.arange(1, length + 1, dtype=np.uint64) * _GOLDEN
        words = _mix(seeds_B[:, None] + counters)
    return torch.from_numpy((words >> np.uint64(1)).astype(np.int64))


def _mix(x: Words) -> Words:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014): each input bit flips each output bit half of the time."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
