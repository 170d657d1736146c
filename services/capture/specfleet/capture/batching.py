"""Which prompts share a forward pass. Pure functions and a pure estimator; no I/O."""

from collections.abc import Sequence

# Prompts taken from the bus at once. More would hoard work that other workers could start on.
MAX_FETCH = 64


def plan_batches(lengths: Sequence[int], max_batch_tokens: int) -> list[list[int]]:
    """Indices grouped into batches of similar length; rows × longest row ≤ max_batch_tokens in each.

    A prompt longer than the limit gets a batch of its own: refusing it would be a second limit on lengths beside
    data.max_length. Every index appears exactly once.
    """
    batches: list[list[int]] = []
    # Longest first: the first row of a batch is its padded length, so the cap is exact.
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        batch = batches[-1] if batches else []
        if batch and (len(batch) + 1) * lengths[batch[0]] <= max_batch_tokens:
            batch.append(index)
        else:
            batches.append([index])
    return batches


def padding_share(lengths: Sequence[int]) -> float:
    """Share of a padded batch that is padding, 0..1."""
    return 1.0 - sum(lengths) / (len(lengths) * max(lengths)) if lengths else 0.0


class FetchSize:
    """How many prompts about fill one batch, from the lengths seen so far."""

    def __init__(self) -> None:
        self._mean_tokens = 0.0

    def saw(self, lengths: Sequence[int]) -> None:
        """Moves the estimate half-way to the mean of these lengths: lengths drift slowly within a prompt set."""
        if lengths:
            mean = sum(lengths) / len(lengths)
            self._mean_tokens = (self._mean_tokens + mean) / 2 if self._mean_tokens else mean

    def size(self, max_batch_tokens: int) -> int:
        """1..MAX_FETCH. Starts small, because nothing is known before the first prompt."""
        if not self._mean_tokens:
            return min(8, MAX_FETCH)
        return max(1, min(MAX_FETCH, round(max_batch_tokens / self._mean_tokens)))
