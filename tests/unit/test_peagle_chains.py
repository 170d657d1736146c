"""Which elements are trained: chain-of-depth sampling."""

import math

import pytest
import torch
from fixtures.eagle3 import random_samples

from specfleet.trainer.strategies.draws import position_draws, visit_seeds
from specfleet.trainer.strategies.eagle3.batch import MaskAlign, supervised
from specfleet.trainer.strategies.peagle.batch import collate, sample_chains

Chains = list[set[tuple[int, int]]]


def _samples(masks: list[list[int]]) -> list[dict[str, torch.Tensor]]:
    samples = random_samples([len(mask) for mask in masks])
    for index, (sample, mask) in enumerate(zip(samples, masks, strict=True)):
        sample["loss_mask"] = torch.tensor(mask, dtype=torch.uint8)
        sample["visit"] = torch.tensor([0, index])
    return samples


def _collate(
    samples: list[dict[str, torch.Tensor]], depths: int = 4, align: MaskAlign = "strict", ratio: float = 1.0,
    least: float = 1.0, seed: int = 1,
) -> dict[str, torch.Tensor]:  # fmt: skip
    return collate(samples, visit_seeds(samples, seed), depths, align, ratio, least)


def _chains(batch: dict[str, torch.Tensor]) -> Chains:
    """Per depth the set of (sample, anchor)."""
    padded = batch["input_ids"].shape[1]
    parts = batch["chains"].split(batch["chain_counts"].tolist())
    return [{divmod(flat, padded) for flat in part.tolist()} for part in parts]


def test_full_ratio_keeps_every_chain() -> None:
    """T = 4, everything supervised, ρ = ρ_min = 1: depths 0 … 3 keep anchors {0..3}, {0,1,2}, {0,1}, {0}."""
    rows = [torch.arange(4 - depth) for depth in range(4)]
    kept = sample_chains(rows, torch.zeros(4, 4, dtype=torch.int64), 4, 1.0, 1.0)
    assert [rows[d][index].tolist() for d, index in enumerate(kept)] == [[0, 1, 2, 3], [0, 1, 2], [0, 1], [0]]


def test_chains_stay_inside_the_text_and_their_answer() -> None:
    """Strict: anchor a at depth d needs x_{a+1} … x_{a+2+d} supervised. No wrap-around, nothing across samples."""
    chains = _chains(_collate(_samples([[0, 1, 1, 1, 0, 0, 1, 1, 1, 1], [1, 1, 1]])))
    assert chains[0] == {(0, 0), (0, 1), (0, 5), (0, 6), (0, 7), (1, 0)}
    assert chains[1] == {(0, 0), (0, 5), (0, 6)}
    assert chains[2] == {(0, 5)}
    assert chains[3] == set()


@pytest.mark.parametrize("align", ["strict", "input", "compat"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_quota_and_nesting(align: MaskAlign, seed: int) -> None:
    masks = [[0] * 5 + [1] * 60, [0] * 3 + [1] * 20 + [0] * 4 + [1] * 30, [1] * 9]
    batch = _collate(_samples(masks), 5, align, ratio=0.7, least=0.3, seed=seed)
    chains = _chains(batch)
    for sample, mask in enumerate(masks):
        live = supervised(torch.tensor([mask]), torch.tensor([len(mask)]), 5, align)[:, 0]
        mine = [{a for s, a in depth if s == sample} for depth in chains]
        assert mine[0] == set(live[0].nonzero().flatten().tolist())
        for depth in range(1, 5):
            allowed = set(live[depth].nonzero().flatten().tolist())
            if depth > 1:
                allowed &= mine[depth - 1]
            assert mine[depth] <= allowed
            quota = math.floor(max(0, len(mine[0]) - depth) * max(0.7**depth, 0.3) + 1e-9)
            assert len(mine[depth]) == min(quota, len(allowed))


def test_draws_depend_on_the_visit_alone() -> None:
    """Batch mates and padding change nothing; another visit or seed draws otherwise."""
    mask = [0] * 4 + [1] * 50
    one, other = _samples([mask, [0] + [1] * 90])
    alone = _chains(_collate([one], ratio=0.6, least=0.2))
    together = _chains(_collate([other, one], ratio=0.6, least=0.2))
    assert [{a for s, a in depth if s == 1} for depth in together] == [{a for _, a in depth} for depth in alone]
    assert _chains(_collate([one], ratio=0.6, least=0.2, seed=2)) != alone
    later = {**one, "visit": torch.tensor([1, 0])}
    assert _chains(_collate([later], ratio=0.6, least=0.2)) != alone


def test_every_chain_is_equally_likely() -> None:
    """Depth 1 keeps half of 20 anchors; over many visits each is kept about half of the time."""
    rows = [torch.arange(21), torch.arange(20)]
    seeds = visit_seeds([{"visit": torch.tensor([epoch, 0])} for epoch in range(600)], seed=3)
    draws = position_draws(seeds, 21 * 2).view(600, 21, 2)
    counts = torch.zeros(20)
    for visit in range(600):
        counts[rows[1][sample_chains(rows, draws[visit].T, 21, 0.5, 0.5)[1]]] += 1
    assert counts.sum() == 600 * 10
    assert (counts / 600 - 0.5).abs().max() < 0.08  # four standard deviations


def test_elements_point_at_their_teacher_rows() -> None:
    lengths = [9, 6]
    samples = _samples([[1] * n for n in lengths])
    for index, (sample, n) in enumerate(zip(samples, lengths, strict=True)):
        sample["final_state"] = torch.tensor([[index, t] for t in range(n)], dtype=torch.float32)
    batch = _collate(samples, 3, ratio=0.7, least=0.5)
    counts = batch["chain_counts"].tolist()
    parts = zip(batch["chains"].split(counts), batch["teacher_of"].split(counts), strict=True)
    for depth, (anchors, judges) in enumerate(parts):
        assert len(anchors)
        for anchor, judge in zip(anchors.tolist(), judges.tolist(), strict=True):
            sample_index, a = divmod(anchor, 9)
            assert batch["teacher_states"][judge].tolist() == [sample_index, a + 1 + depth]


@pytest.mark.parametrize("masks", [[[0] * 8], [[1], [1, 1]]], ids=["unsupervised", "short"])
def test_nothing_to_sample(masks: list[list[int]]) -> None:
    batch = _collate(_samples(masks))
    assert batch["chain_counts"].tolist() == [0, 0, 0, 0]
