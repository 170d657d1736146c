"""The order in which an epoch's prompts are worked on: a function of (seed, epoch) alone, so a restart keeps it."""

import numpy as np
import numpy.typing as npt


def epoch_order(seed: int, epoch: int, num_prompts: int) -> npt.NDArray[np.int32]:
    """Permutation [num_prompts] int32: entry i is the prompt index at position i of the epoch.

    PCG64 is numpy's stable bit generator; the same numpy stream gives the same permutation on every platform.
    """
    generator = np.random.Generator(np.random.PCG64([seed & 0xFFFFFFFFFFFFFFFF, epoch]))
    return generator.permutation(np.arange(num_prompts, dtype=np.int32))
