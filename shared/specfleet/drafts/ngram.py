"""The untrained baseline: guess that what followed the last few tokens before will follow again (prompt lookup)."""

from collections.abc import Sequence

import torch

from specfleet.drafts.base import Drafter, Pick, likeliest

# Longer matches are rarer and more often right, so they are tried first.
_SIZES = (3, 2, 1)


class NgramDrafter(Drafter):
    """Looks the last 3, 2, then 1 tokens up among everything before them and copies what followed the latest match."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        # n-gram → position after its latest occurrence that has a follower.
        self._after: dict[tuple[int, ...], int] = {}

    def extend(self, next_ids: Sequence[int], aux_TKH: torch.Tensor) -> None:
        for token in next_ids:
            # Indexed only now that a follower exists: an n-gram must not match itself.
            for size in _SIZES:
                if len(self._ids) >= size:
                    self._after[tuple(self._ids[-size:])] = len(self._ids)
            self._ids.append(token)

    def propose(self, k: int, pick: Pick = likeliest) -> list[int]:
        for size in _SIZES:
            start = self._after.get(tuple(self._ids[-size:])) if len(self._ids) >= size else None
            if start is not None:
                # A match near the end runs into the guesses themselves, so a repeating text keeps repeating.
                text = list(self._ids)
                for offset in range(k):
                    text.append(text[start + offset])
                return text[len(self._ids) :]
        return []
