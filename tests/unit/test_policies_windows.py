"""Windows: cut once each, in order, whole; assigned in balance. And the epoch order they follow."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specfleet.policies.order import epoch_order
from specfleet.policies.windows import Candidate, Cut, Order, Tail, assign, cut


def captured(*seqs: int, per_epoch: int = 100) -> list[Candidate]:
    """Captured in the order given; returned in seq order."""
    found = [Candidate(seq, seq // per_epoch, arrived) for arrived, seq in enumerate(seqs, start=1)]
    return sorted(found, key=lambda candidate: candidate.seq)


def pending(*seqs: int, per_epoch: int = 100) -> list[Candidate]:
    return [Candidate(seq, seq // per_epoch) for seq in seqs]


def members(found: Cut | None) -> list[int] | None:
    return None if found is None else [candidate.seq for candidate in found.members]


class TestCut:
    def test_deterministic_waits_for_the_missing_sample(self) -> None:
        have = captured(3, 1, 2, 5)
        rules = {"size": 3, "order": "deterministic", "tail": "carry", "next_epoch": None}
        assert members(cut(have, pending(0), **rules)) is None
        assert members(cut(have, pending(4), **rules)) == [1, 2, 3]

    def test_arrival_takes_who_came_first(self) -> None:
        found = cut(captured(5, 1, 4, 2), pending(0), size=3, order="arrival", tail="carry", next_epoch=0)
        assert members(found) == [5, 1, 4]

    def test_carry_spans_epochs_and_only_the_last_window_is_short(self) -> None:
        have = captured(8, 9, 10, 11, per_epoch=10)
        assert members(cut(have, [], size=3, order="deterministic", tail="carry", next_epoch=1)) == [8, 9, 10]
        rest = captured(11, per_epoch=10)
        assert cut(rest, [], size=3, order="deterministic", tail="carry", next_epoch=1) is None
        assert members(cut(rest, [], size=3, order="deterministic", tail="carry", next_epoch=None)) == [11]

    @pytest.mark.parametrize("order", ["deterministic", "arrival"])
    def test_pad_and_drop_end_an_epoch(self, order: Order) -> None:
        have, more = captured(8, 9, per_epoch=10), pending(10, per_epoch=10)
        assert members(cut(have, more, size=3, order=order, tail="pad", next_epoch=1)) == [8, 9]
        found = cut(have, more, size=3, order=order, tail="drop", next_epoch=1)
        assert found is not None
        assert ([c.seq for c in found.dropped], found.members) == ([8, 9], ())
        assert cut(have, [], size=3, order=order, tail="pad", next_epoch=0) is None
        assert cut(have, pending(7, per_epoch=10), size=4, order=order, tail="pad", next_epoch=1) is None

    def test_nothing_to_cut(self) -> None:
        assert cut([], [], size=3, order="deterministic", tail="carry", next_epoch=None) is None

    @settings(max_examples=150, deadline=None)
    @given(
        data=st.data(),
        order=st.sampled_from(["deterministic", "arrival"]),
        tail=st.sampled_from(["drop", "pad", "carry"]),
    )
    def test_every_sample_ends_in_one_window_or_is_dropped(self, data: st.DataObject, order: Order, tail: Tail) -> None:
        """Captures arrive in any order within a bounded reach, prompts die, ingestion lags: all are accounted for."""
        prompts, epochs = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 3))
        size, reach = data.draw(st.integers(1, 5)), data.draw(st.integers(5, 9))
        total, rng = prompts * epochs, data.draw(st.randoms(use_true_random=False))
        done: dict[int, Candidate] = {}
        waiting, ingested, arrived = [], 0, 0
        windows: list[list[int]] = []
        dropped: list[int] = []
        dead: list[int] = []
        while len(dead) + len(dropped) + sum(map(len, windows)) < total:
            before = (ingested, len(waiting), len(done), len(windows), len(dropped))
            # Credits bound what is under way, captured or not.
            if ingested < total and len(waiting) + len(done) < reach:
                waiting.append(ingested)
                ingested += 1
            elif waiting:
                seq = waiting.pop(rng.randrange(len(waiting)))
                if rng.random() < 0.1:
                    dead.append(seq)
                else:
                    arrived += 1
                    done[seq] = Candidate(seq, seq // prompts, arrived)
            found = cut(
                [done[seq] for seq in sorted(done)],
                [Candidate(seq, seq // prompts) for seq in sorted(waiting)[:size]],
                size=size,
                order=order,
                tail=tail,
                next_epoch=ingested // prompts if ingested < total else None,
            )
            if found is not None:
                windows += [[c.seq for c in found.members]] if found.members else []
                dropped += [c.seq for c in found.dropped]
                for candidate in (*found.members, *found.dropped):
                    del done[candidate.seq]
            assert (ingested, len(waiting), len(done), len(windows), len(dropped)) != before, "no progress"
        assert Counter([seq for window in windows for seq in window] + dropped + dead) == Counter(range(total))
        assert all(len(window) <= size for window in windows)
        if tail == "carry":
            assert all(len(window) == size for window in windows[:-1])
            assert dropped == []
        else:
            assert all(len({seq // prompts for seq in window}) == 1 for window in windows)
        if tail == "drop":
            assert all(len(window) == size for window in windows)
        if order == "deterministic":
            flat = [seq for window in windows for seq in window]
            assert flat == sorted(flat)


class TestAssign:
    @given(
        tokens=st.lists(st.integers(1, 2048), min_size=1, max_size=64),
        world=st.integers(1, 8),
        batch_size=st.integers(1, 8),
    )
    def test_each_sample_once_and_counts_equal(self, tokens: list[int], world: int, batch_size: int) -> None:
        slots = assign(tokens, world, batch_size)
        assert len(slots) == world
        assert sorted(i for rank in slots for batch in rank for i in batch) == list(range(len(tokens)))
        assert all(1 <= len(batch) <= batch_size for rank in slots for batch in rank)
        sizes = [sum(len(batch) for batch in rank) for rank in slots]
        assert max(sizes) - min(sizes) <= 1
        most = max(len(rank) for rank in slots)
        assert all(len(rank) == min(most, size) for rank, size in zip(slots, sizes, strict=True))

    def test_tokens_balance(self) -> None:
        rng = np.random.Generator(np.random.PCG64(0))
        tokens = [int(n) for n in rng.integers(16, 2048, size=64)]
        loads = [sum(tokens[i] for batch in rank for i in batch) for rank in assign(tokens, 4, 8)]
        assert max(loads) - min(loads) <= max(tokens) // 4

    def test_similar_lengths_share_a_micro_batch(self) -> None:
        assert assign([1, 100, 2, 99], 1, 2) == [[[1, 3], [2, 0]]]

    def test_fewer_samples_than_ranks(self) -> None:
        assert assign([5], 3, 4) == [[[0]], [], []]


def test_epoch_order_is_fixed_for_ever() -> None:
    """These values must never change: a resumed run would train other windows."""
    assert epoch_order(42, 0, 8).tolist() == FIRST
    assert epoch_order(42, 1, 8).tolist() != FIRST
    order = epoch_order(7, 3, 1000)
    assert order.dtype == np.int32
    assert sorted(order.tolist()) == list(range(1000))


FIRST = [3, 4, 2, 7, 6, 1, 5, 0]
