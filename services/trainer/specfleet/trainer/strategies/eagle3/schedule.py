"""How many rollout steps a micro-batch trains."""

from typing import Literal

import torch

TttSchedule = Literal["constant", "curriculum", "sampled"]


def rollout_length(schedule: TttSchedule, longest: int, step: int, total_steps: int) -> int:
    """Between 1 and `longest`. step: the optimizer step, from 1.

    curriculum: every length equally long during the first half of the run, then `longest`. sampled: uniform, from torch's
    generator on the CPU (saved in checkpoints, so a restarted run draws the same).
    """
    match schedule:
        case "constant":
            return longest
        case "curriculum":
            half = max(total_steps // 2, 1)
            return min(longest, 1 + (step - 1) * longest // half)
        case "sampled":
            return int(torch.randint(1, longest + 1, ()))
