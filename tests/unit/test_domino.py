"""Domino: the curriculum, the recurrence, which slots are corrected, what they may see, and what leaves the gradient alone."""

import math

import pytest
import torch
from fixtures.blocks import frozen_matrices, random_features
from fixtures.corrected import domino_strategy, tiny_domino, training_logits
from fixtures.objective import assert_exact, assert_same, assert_zero_but_touched, gradient
from torch.nn import functional

from specfleet.trainer.strategies.corrected_batch import run_blocks
from specfleet.trainer.strategies.domino import DominoStrategy
from specfleet.trainer.strategies.domino.schedule import base_weight

TOTAL = 10


def _strategy(
    dtype: torch.dtype = torch.float64, *, shift: bool = False, step: int = 3, num_layers: int = 2, **section: object
) -> DominoStrategy:
    """By default in the middle of its curriculum, where both losses count."""
    draft = tiny_domino(dtype=dtype, shift=shift, num_layers=num_layers)
    strategy = domino_strategy(draft, *frozen_matrices(dtype), TOTAL, **section)
    strategy.begin_step(step)
    return strategy


@pytest.mark.parametrize(
    ("step", "ratio", "expected"), [(0, 0.5, 1.0), (250, 0.5, 0.5), (499, 0.5, 0.002), (500, 0.5, 0.0), (500, 1.0, 0.5)]
)
def test_curriculum(step: int, ratio: float, expected: float) -> None:
    assert base_weight(step, 1000, 1.0, ratio) == pytest.approx(expected)


def test_curriculum_follows_the_optimizer_step() -> None:
    strategy = _strategy(base_weight=0.8, base_decay_ratio=0.5)
    seen = []
    for step in (1, 2, 6, 9, 3):  # going back as after a restore
        strategy.begin_step(step)
        seen.append(strategy.base_weight)
    assert seen == pytest.approx([0.8, 0.64, 0.0, 0.0, 0.48])
    assert base_weight(0, 0, 1.0, 0.5) == 0.0  # no horizon, no curriculum


def test_recurrence() -> None:
    draft = tiny_domino(hidden_size=4, gru_hidden_size=1)
    with torch.no_grad():
        draft.prefix_gru.weight_ih_l0.fill_(0.25)
        draft.prefix_gru.weight_hh_l0.fill_(1.0)
    embedding = torch.arange(3.0)[:, None].expand(3, 4)  # token 1 and 2 add up to inputs 1 and 2
    _, state = draft.code(0, torch.zeros(1, 4), torch.tensor([1]), None, embedding)
    _, second = draft.code(1, torch.zeros(1, 4), torch.tensor([2]), state, embedding)
    assert state is not None
    assert second is not None
    assert (float(state.detach()), float(second.detach())) == pytest.approx((0.204824, 0.281315), abs=1e-6)


@pytest.mark.parametrize(("shift", "corrected"), [(False, [2, 3, 4]), (True, [1, 2, 3, 4])])
def test_which_slots_are_corrected(shift: bool, corrected: list[int]) -> None:
    draft = tiny_domino(shift=shift)
    first = draft.config.first_slot
    codes = draft.codes(
        torch.randn(1, 5 - first, 32), torch.tensor([[5, 6, 7, 8, 9][: 5 - first]]), torch.randn(384, 32)
    )
    assert [first + i for i in range(5 - first) if codes[0, i].any()] == corrected
    assert draft.config.num_guesses == draft.max_draft_tokens == 4


@pytest.mark.parametrize("shift", [False, True])
def test_no_slot_sees_what_it_is_to_guess(shift: bool) -> None:
    """Guess i of the block at a follows x_a … x_{a+i} and the states before a, and nothing else."""
    strategy = _strategy(shift=shift, num_anchors=100)
    samples = random_features([16], dtype=torch.float64)
    tensors, before = training_logits(strategy, samples)
    block = 2
    anchor, guesses = int(tensors["anchors"][block]), before.shape[1]
    for offset in range(1, 5):
        samples[0]["input_ids"][anchor + offset] += 1
        _, after = training_logits(strategy, samples)
        samples[0]["input_ids"][anchor + offset] -= 1
        changed = [not torch.equal(before[block, i], after[block, i]) for i in range(guesses)]
        assert changed == [i >= offset for i in range(guesses)]
    samples[0]["aux_states"][anchor:] += 1.0
    assert torch.equal(training_logits(strategy, samples)[1][block], before[block])
    samples[0]["aux_states"][anchor - 1] += 1.0
    assert not torch.equal(training_logits(strategy, samples)[1][block], before[block])


@pytest.mark.parametrize("shift", [False, True])
def test_splitting_and_padding_do_not_change_the_gradient(shift: bool) -> None:
    strategy = _strategy(shift=shift, num_anchors=4)
    samples = random_features([21, 13, 9], dtype=torch.float64)
    whole = gradient(strategy, [samples])
    # Denominators are fp32, and their sum depends on the split in its last digit.
    assert_same(gradient(strategy, [[sample] for sample in samples]), whole, rtol=1e-6)
    assert_same(gradient(strategy, [samples[:1], samples[:0:-1]]), whole, rtol=1e-6)
    unsupervised = random_features([40], seed=2, dtype=torch.float64)
    unsupervised[0]["loss_mask"].zero_()
    assert_same(gradient(strategy, [[*unsupervised, *samples]]), whole)
    assert all(grad.abs().sum() > 0 for grad in whole[1].values())


@pytest.mark.parametrize("chunk_blocks", [1, 3])
def test_chunk_size_does_not_change_the_gradient(chunk_blocks: int) -> None:
    samples = random_features([21, 13], dtype=torch.float64)
    assert_same(gradient(_strategy(chunk_blocks=chunk_blocks), [samples]), gradient(_strategy(), [samples]))


def test_gradient_of_the_whole_objective_is_exact() -> None:
    strategy = _strategy(shift=True, num_anchors=2, num_layers=1)
    assert_exact(strategy, random_features([9], dtype=torch.float64), picks=1)


@pytest.mark.parametrize("step", [1, 3, TOTAL])
@pytest.mark.parametrize("how", ["masked", "too short"])
def test_a_batch_without_rows_touches_every_parameter_with_zero(step: int, how: str) -> None:
    samples = random_features([9, 6] if how == "masked" else [1, 1], prompt=0)
    for sample in samples:
        sample["loss_mask"].fill_(how != "masked")
    assert_zero_but_touched(_strategy(torch.float32, step=step), samples)


def test_skipped_parts_are_exactly_absent() -> None:
    """λ = 1 is the backbone's loss alone and leaves the correction a zero gradient; λ = 0 is the corrected loss alone."""
    samples = random_features([14], dtype=torch.float64)
    first, last = _strategy(step=1), _strategy(step=TOTAL)
    _, grads = gradient(first, [samples])
    assert not any(grad.any() for name, grad in grads.items() if name.startswith(("prefix_gru", "embed_proj")))
    assert grads["fc.weight"].any()
    metrics = {
        step: strategy.objective(strategy.prepare(strategy.collate(samples))).metrics
        for step, strategy in (("first", first), ("last", last))
    }
    assert {"ce_base", "acc_base", "tau_greedy_base"} <= metrics["first"].keys()
    assert {"ce", "acc", "tau_greedy"} <= metrics["last"].keys()
    assert not {"ce", "acc"} & metrics["first"].keys()
    assert not {"ce_base", "acc_base"} & metrics["last"].keys()
    assert [float(x) for x in metrics["first"]["base_weight"]] == [1.0, 1.0]


@pytest.mark.parametrize("shift", [False, True])
def test_loss_is_the_decayed_mean_of_both_parts(shift: bool) -> None:
    """Guess i of a block weighs exp(−i/γ), whichever slot makes it, up to the first token that is not supervised."""
    strategy = _strategy(shift=shift, loss_decay=1.5, num_anchors=100)
    sample = random_features([20], dtype=torch.float64)[0]
    sample["loss_mask"][12] = 0
    tensors, corrected = training_logits(strategy, [sample])
    with torch.no_grad():
        uncorrected = run_blocks(strategy.draft, tensors, strategy._embedding) @ strategy._head.T
    ids, mask = sample["input_ids"].long(), sample["loss_mask"].tolist()
    total = norm = 0.0
    for n, anchor in enumerate(tensors["anchors"].tolist()):
        for i in range(corrected.shape[1]):
            if anchor + 1 + i >= len(ids) or not mask[anchor + 1 + i]:
                break
            ces = [float(functional.cross_entropy(z[n, i], ids[anchor + 1 + i])) for z in (corrected, uncorrected)]
            weight = math.exp(-i / 1.5)
            total += weight * ((1 - strategy.base_weight) * ces[0] + strategy.base_weight * ces[1])
            norm += weight
    assert 0 < strategy.base_weight < 1
    assert gradient(strategy, [[sample]])[0] == pytest.approx(total / norm, rel=1e-6)


def test_samples_too_short_for_a_block_are_counted() -> None:
    strategy = _strategy(torch.float32)
    metrics = strategy.objective(strategy.prepare(strategy.collate(random_features([12, 4], prompt=3)))).metrics
    assert [float(x) for x in metrics["skipped_samples"]] == [1.0, 2.0]


def test_identity_names_what_a_resumed_run_must_share() -> None:
    base = _strategy(torch.float32).identity()
    assert base["strategy"] == "domino"
    assert (base["shift_label"], base["gru_hidden_size"], base["embedding_size"]) == ("False", "12", "6")
    assert _strategy(torch.float32, shift=True).identity() != base
    assert _strategy(torch.float32, base_decay_ratio=1.0).identity() != base
    assert all(isinstance(value, str) for value in base.values())


def test_runs_in_bf16_close_to_fp32() -> None:
    samples = random_features([24, 15])
    exact, _ = gradient(_strategy(torch.float32), [samples])
    low, grads = gradient(_strategy(torch.bfloat16), [samples])
    assert low == pytest.approx(exact, rel=2e-2)
    assert all(grad.isfinite().all() for grad in grads.values())
