"""The draft's reduced vocabulary: which target tokens its head can propose, chosen by how often they are supervised."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specfleet.contracts.errors import DataError
from specfleet.data.prompt_set import PromptSet


@dataclass(frozen=True)
class VocabMap:
    """d2t [V_d] int64: target id of draft id j is j + d2t[j]. t2d [V] bool: whether the draft can propose a target id.

    Invariant: nonzero(t2d) == d2t + arange(V_d).
    """

    d2t: npt.NDArray[np.int64]
    t2d: npt.NDArray[np.bool_]

    def __post_init__(self) -> None:
        if not np.array_equal(np.flatnonzero(self.t2d), self.target_ids):
            raise DataError(
                "SF-DATA-VOCAB-MAP",
                f"d2t ({len(self.d2t)} draft ids) and t2d ({self.t2d.sum()} of {len(self.t2d)} target ids) disagree",
            )

    @property
    def draft_vocab_size(self) -> int:
        return len(self.d2t)

    @property
    def vocab_size(self) -> int:
        return len(self.t2d)

    @property
    def target_ids(self) -> npt.NDArray[np.int64]:
        """Target id of every draft id, ascending: [V_d]."""
        return self.d2t + np.arange(len(self.d2t), dtype=np.int64)

    def coverage(self, counts: npt.NDArray[np.int64]) -> float:
        """Share of counted tokens that the draft can propose; 1.0 when nothing was counted."""
        total = int(counts.sum())
        return float(counts[self.t2d].sum() / total) if total else 1.0


def count_loss_tokens(prompt_set: PromptSet, vocab_size: int) -> npt.NDArray[np.int64]:
    """How often each target id is supervised, [V] int64. Raises DataError SF-DATA-VOCAB-ID for an id outside [0, V)."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for table in prompt_set.iter_tables(["input_ids", "loss_mask"]):
        ids = table.column("input_ids").combine_chunks().flatten().to_numpy()
        mask = np.frombuffer(b"".join(table.column("loss_mask").to_pylist()), dtype=np.uint8)
        supervised = ids[mask == 1]
        if supervised.size and not 0 <= int(supervised.min()) <= int(supervised.max()) < vocab_size:
            raise DataError(
                "SF-DATA-VOCAB-ID",
                f"{prompt_set.path} holds token ids {supervised.min()}..{supervised.max()}, the vocabulary of the "
                f"target ends at {vocab_size - 1}: it was prepared with another tokenizer",
            )
        counts += np.bincount(supervised, minlength=vocab_size)
    return counts


def build_vocab_map(counts: npt.NDArray[np.int64], draft_vocab_size: int, required_ids: Iterable[int] = ()) -> VocabMap:
    """The commonest target ids (ties: smaller id first), with every required id (EOS, stop ids) forced in.

    When fewer ids were ever supervised the rest is filled with the smallest unused ids, so every draft id is a valid
    target id. draft_vocab_size equal to V is the identity.
    Raises DataError SF-DATA-VOCAB-SIZE (not in 1..V, or fewer than the required ids), SF-DATA-VOCAB-ID.
    """
    vocab_size = len(counts)
    required = np.unique(np.fromiter(required_ids, dtype=np.int64))
    if not 1 <= draft_vocab_size <= vocab_size:
        raise DataError(
            "SF-DATA-VOCAB-SIZE",
            f"draft_vocab_size is {draft_vocab_size}, it must lie in 1..{vocab_size} (the target's vocabulary)",
        )
    if required.size and not 0 <= required[0] <= required[-1] < vocab_size:
        raise DataError("SF-DATA-VOCAB-ID", f"required ids {required.tolist()} must lie in 0..{vocab_size - 1}")
    if required.size > draft_vocab_size:
        raise DataError(
            "SF-DATA-VOCAB-SIZE",
            f"draft_vocab_size is {draft_vocab_size}, but {required.size} stop ids must be in it: {required.tolist()}",
        )
    t2d = np.zeros(vocab_size, dtype=np.bool_)
    t2d[required] = True
    # A stable sort by falling count keeps ids ascending within a tie; ids never counted come last, smallest first.
    by_count = np.argsort(-counts, kind="stable")
    others = by_count[~t2d[by_count]]
    t2d[others[: draft_vocab_size - required.size]] = True
    return VocabMap(np.flatnonzero(t2d) - np.arange(draft_vocab_size, dtype=np.int64), t2d)
