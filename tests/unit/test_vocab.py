"""The draft's vocabulary: deterministic choice, forced stop tokens, invariants, refusals."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specfleet.contracts.errors import DataError
from specfleet.data.vocab import VocabMap, build_vocab_map


def counts(*values: int) -> np.ndarray:
    return np.asarray(values, dtype=np.int64)


def test_r32_a_stop_token_that_was_never_supervised_is_forced_in() -> None:
    tally = np.zeros(32, dtype=np.int64)
    tally[:10] = 5
    chosen = build_vocab_map(tally, 8, [19]).target_ids
    assert chosen.tolist() == [0, 1, 2, 3, 4, 5, 6, 19]


def test_a_known_map() -> None:
    """5 three times, 2 twice, 9 once; two of ten are kept."""
    mapping = build_vocab_map(counts(0, 0, 2, 0, 0, 3, 0, 0, 0, 1), 2)
    assert mapping.target_ids.tolist() == [2, 5]
    assert mapping.d2t.tolist() == [2, 4]
    assert np.flatnonzero(mapping.t2d).tolist() == [2, 5]


def test_the_commonest_win_and_ties_go_to_the_smaller_id() -> None:
    mapping = build_vocab_map(counts(1, 7, 3, 3, 9, 3), 4)
    assert mapping.target_ids.tolist() == [1, 2, 3, 4]
    assert mapping.d2t.tolist() == [1, 1, 1, 1]
    assert mapping.t2d.tolist() == [False, True, True, True, True, False]
    assert mapping.coverage(counts(1, 7, 3, 3, 9, 3)) == pytest.approx(22 / 26)


def test_unused_rows_are_filled_with_the_smallest_unused_ids() -> None:
    assert build_vocab_map(counts(0, 0, 0, 0, 0, 4), 3).target_ids.tolist() == [0, 1, 5]


def test_the_whole_vocabulary_is_the_identity() -> None:
    mapping = build_vocab_map(counts(0, 3, 0), 3, [2])
    assert mapping.d2t.tolist() == [0, 0, 0]
    assert mapping.t2d.all()
    assert (mapping.draft_vocab_size, mapping.vocab_size) == (3, 3)


def test_nothing_counted_is_fully_covered() -> None:
    assert build_vocab_map(counts(0, 0), 1).coverage(counts(0, 0)) == 1.0


@pytest.mark.parametrize(
    ("size", "required", "code"),
    [(0, [], "SF-DATA-VOCAB-SIZE"), (-1, [], "SF-DATA-VOCAB-SIZE"), (5, [], "SF-DATA-VOCAB-SIZE"),
     (1, [0, 1], "SF-DATA-VOCAB-SIZE"), (2, [4], "SF-DATA-VOCAB-ID"), (2, [-1], "SF-DATA-VOCAB-ID")],
)  # fmt: skip
def test_impossible_sizes_and_ids_are_refused(size: int, required: list[int], code: str) -> None:
    with pytest.raises(DataError) as caught:
        build_vocab_map(counts(1, 2, 3, 4), size, required)
    assert caught.value.code == code
    assert str(size) in caught.value.message or str(required[0]) in caught.value.message


def test_maps_that_disagree_are_refused() -> None:
    with pytest.raises(DataError, match="SF-DATA-VOCAB-MAP"):
        VocabMap(np.asarray([0, 0], dtype=np.int64), np.asarray([True, False, True]))


@given(st.data())
def test_invariants(data: st.DataObject) -> None:
    tally = np.asarray(data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=40)), dtype=np.int64)
    size = data.draw(st.integers(1, len(tally)))
    required = data.draw(st.sets(st.integers(0, len(tally) - 1), max_size=size))
    mapping = build_vocab_map(tally, size, required)
    chosen = mapping.target_ids.tolist()
    assert np.flatnonzero(mapping.t2d).tolist() == chosen == sorted(set(chosen))
    assert len(chosen) == size
    assert required <= set(chosen)
    # No id outside is preferable to a chosen one that nobody forced in.
    rank = {token: (-int(tally[token]), token) for token in range(len(tally))}
    optional, outside = set(chosen) - required, set(range(len(tally))) - set(chosen)
    if optional and outside:
        assert max(rank[t] for t in optional) < min(rank[t] for t in outside)
