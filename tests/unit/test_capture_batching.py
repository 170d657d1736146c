"""Which prompts share a forward pass."""

from hypothesis import given
from hypothesis import strategies as st

from specfleet.capture.batching import MAX_FETCH, FetchSize, padding_share, plan_batches


@given(lengths=st.lists(st.integers(1, 300), max_size=60), limit=st.integers(1, 1000))
def test_every_prompt_once_and_padded_tokens_under_the_limit(lengths: list[int], limit: int) -> None:
    batches = plan_batches(lengths, limit)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= limit


def test_similar_lengths_meet() -> None:
    assert plan_batches([10, 100, 11, 99], 200) == [[1, 3], [2, 0]]


def test_a_prompt_longer_than_the_limit_runs_alone() -> None:
    assert plan_batches([50, 500, 50], 100) == [[1], [0, 2]]


def test_padding_share() -> None:
    assert padding_share([10, 5]) == 0.25
    assert padding_share([7, 7]) == 0.0
    assert padding_share([]) == 0.0


def test_fetch_size_fills_about_one_batch() -> None:
    fetch = FetchSize()
    assert 1 <= fetch.size(4096) <= 8
    for _ in range(10):
        fetch.saw([100, 300])
    assert fetch.size(4000) == 20
    assert fetch.size(10) == 1
    assert fetch.size(10**9) == MAX_FETCH
