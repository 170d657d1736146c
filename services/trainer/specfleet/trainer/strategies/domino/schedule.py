"""How much of the loss the uncorrected logits get. Without it the backbone leaves the work to the correction and collapses."""


def base_weight(step: int, total_steps: int, start: float, decay_ratio: float) -> float:
    """λ of an optimizer step, counted from 0: falls from `start` to 0 in a line over decay_ratio · total_steps.

    Without a known horizon (total_steps 0) there is no curriculum: 0.
    """
    if total_steps <= 0:
        return 0.0
    span = max(1, int(total_steps * decay_ratio))
    return min(max(start * (1.0 - min(step / span, 1.0)), 0.0), 1.0)
