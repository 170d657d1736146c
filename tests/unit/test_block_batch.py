"""Where blocks are anchored and what their slots are to predict."""

import numpy as np
import pytest
import torch
from fixtures.blocks import random_features

from specfleet.trainer.strategies.anchors import contiguous_mask, sample_anchors, slot_decay, slot_labels
from specfleet.trainer.strategies.block_batch import BlockPlan, collate_blocks
from specfleet.trainer.strategies.draws import position_draws, visit_seeds


def _plan(**changes: object) -> BlockPlan:
    values = {
        "block_size": 4, "num_anchors": 3, "sample_from_anchor": False, "contiguous": True, "chunk_blocks": 2, "seed": 1
    }  # fmt: skip
    return BlockPlan(**{**values, **changes})  # type: ignore[arg-type]


def test_an_anchor_needs_two_supervised_tokens_in_a_row() -> None:
    mask = torch.tensor([[0, 1, 1, 0, 1, 0, 1, 1, 1], [1, 0, 1, 0, 0, 0, 0, 0, 0]])
    draws = position_draws(visit_seeds(random_features([9, 9]), 0), 9)
    sample, position, counts = sample_anchors(mask, draws, 512)
    assert sample.tolist() == [0, 0, 0]
    assert position.tolist() == [1, 6, 7]
    assert counts.tolist() == [3, 0]


def test_anchors_are_a_uniform_draw_without_replacement() -> None:
    mask = torch.ones(1, 11)
    hits = np.zeros(11)
    for visit in range(2000):
        seeds = visit_seeds([{"visit": torch.tensor([visit, 5])}], 42)
        _, position, counts = sample_anchors(mask, position_draws(seeds, 11), 4)
        assert counts.tolist() == [4]
        assert position.tolist() == sorted(set(position.tolist()))
        hits[position] += 1
    # 10 eligible positions, each taken with probability 0.4: mean 800, standard deviation 22.
    assert hits[10] == 0
    assert abs(hits[:10] - 800).max() < 110


def test_draws_depend_on_seed_and_visit_alone() -> None:
    features = random_features([12, 30, 17])
    alone = position_draws(visit_seeds(features[2:], 1), 17)
    together = position_draws(visit_seeds(features, 1), 30)
    assert torch.equal(alone[0], together[2, :17])
    other_seed = position_draws(visit_seeds(features, 2), 30)
    features[2]["visit"] = torch.tensor([1, 2])
    other_epoch = position_draws(visit_seeds(features, 1), 30)
    assert not (together == other_seed).any()
    assert torch.equal(together[:2], other_epoch[:2])
    assert not (together[2] == other_epoch[2]).any()


@pytest.mark.parametrize("batch", [[0], [1, 0], [0, 1, 2]])
def test_padding_and_batch_mates_do_not_change_the_blocks(batch: list[int]) -> None:
    features = random_features([21, 34, 9])
    alone = collate_blocks(features[:1], _plan())
    found = collate_blocks([features[index] for index in batch], _plan())
    mine = found["sample"] == batch.index(0)
    assert torch.equal(found["anchors"][mine], alone["anchors"])
    assert torch.equal(found["labels"][mine], alone["labels"])


def test_labels_of_both_conventions() -> None:
    ids, mask = torch.arange(10, 16)[None], torch.tensor([[0, 1, 1, 1, 1, 1]])
    blocks = torch.tensor([0, 0]), torch.tensor([1, 3])
    labels, valid = slot_labels(ids, mask, *blocks, 4, sample_from_anchor=False)
    assert labels.tolist() == [[11, 12, 13, 14], [13, 14, 15, 0]]
    assert valid.tolist() == [[False, True, True, True], [False, True, True, False]]
    labels, valid = slot_labels(ids, mask, *blocks, 4, sample_from_anchor=True)
    assert labels.tolist() == [[12, 13, 14, 15], [14, 15, 0, 0]]
    assert valid.tolist() == [[True] * 4, [True, True, False, False]]


def test_a_dspark_block_at_the_end_of_the_text() -> None:
    """a = 2, G = 3, T = 5: labels x_3, x_4, none."""
    labels, valid = slot_labels(
        torch.arange(20, 25)[None], torch.ones(1, 5), torch.tensor([0]), torch.tensor([2]), 3, sample_from_anchor=True
    )
    assert labels.tolist() == [[23, 24, 0]]
    assert valid.tolist() == [[True, True, False]]


def test_nothing_counts_behind_a_gap() -> None:
    hole = torch.tensor([[True, False, True]])
    assert contiguous_mask(hole, 0).tolist() == [[True, False, False]]
    assert contiguous_mask(torch.tensor([[False, True, False, True]]), 1).tolist() == [[False, True, False, False]]
    mask = torch.tensor([[1, 1, 1, 0, 1, 1]])
    arguments = (torch.arange(6)[None], mask, torch.tensor([0]), torch.tensor([0]), 6)
    _, strict = slot_labels(*arguments, sample_from_anchor=False)
    _, loose = slot_labels(*arguments, sample_from_anchor=False, contiguous=False)
    assert strict.tolist() == [[False, True, True, False, False, False]]
    assert loose.tolist() == [[False, True, True, False, True, True]]


def test_decay_sums() -> None:
    assert float(slot_decay(16, 1, 7.0).sum()) == pytest.approx(6.630611, abs=1e-6)
    assert float(slot_decay(7, 0, 4.0).sum()) == pytest.approx(3.735212, abs=1e-6)
    assert slot_decay(4, 1, None).tolist() == [0, 1, 1, 1]


def test_a_batch_holds_only_what_is_used() -> None:
    features = random_features([12, 2, 8])
    features[2]["loss_mask"][:] = torch.tensor([0, 1, 1, 0, 0, 0, 0, 0])
    batch = collate_blocks(features, _plan(num_anchors=3, chunk_blocks=2))
    last = int(batch["anchors"][2])
    assert batch["sample"].tolist() == [0, 0, 0, 2]
    assert int(batch["anchors"][3]) == 1
    # Context ends before the last anchor of each sample: its own state is not known when the block is drafted.
    assert torch.equal(
        batch["context_states"], torch.cat((features[0]["aux_states"][:last], features[2]["aux_states"][:1]))
    )
    assert batch["context_positions"].tolist() == [*range(last), 0]
    assert batch["starts"].tolist() == [0, 0, 0, last]
    assert batch["block_bounds"].tolist() == [0, 2, 4]
    assert batch["row_bounds"].tolist() == [0, int(batch["valid"][:2].sum()), int(batch["valid"].sum())]
    assert torch.equal(batch["valid"].flatten().nonzero().flatten(), batch["rows"])
    assert (int(batch["num_sequences"]), int(batch["num_skipped"])) == (2, 1)
    assert (int(batch["num_tokens"]), int(batch["num_loss_tokens"])) == (22, 9 + 2)


def test_a_batch_of_short_samples_is_empty() -> None:
    batch = collate_blocks(random_features([2, 1], prompt=0), _plan())
    assert int(batch["num_skipped"]) == 1  # two supervised tokens are enough
    batch = collate_blocks(random_features([1, 1], prompt=0), _plan())
    assert len(batch["anchors"]) == len(batch["rows"]) == len(batch["context_states"]) == 0
    assert int(batch["num_skipped"]) == 2
