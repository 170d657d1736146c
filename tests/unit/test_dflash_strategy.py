"""The DFlash objective as a whole: what may not change its gradient, and what must."""

import math
from typing import Any

import pytest
import torch
from fixtures.blocks import MASK, frozen_matrices, random_features, tiny_dflash
from fixtures.objective import assert_exact, assert_same, assert_zero_but_touched, gradient

from specfleet.config.features import dflash_layers
from specfleet.config.strategies import DFlashSection
from specfleet.trainer.strategies.dflash import DFlashStrategy

# Denominators of decayed weights are sums in fp32, so splits agree to its precision even where all else is fp64.
RTOL = 1e-6
LOSSES = ["ce", "dpace", "dpace_cumulative", "dpace_continuation"]
WINDOW = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}


def _strategy(
    dtype: torch.dtype = torch.float64, draft: dict[str, Any] | None = None, **section: Any
) -> DFlashStrategy:
    model = tiny_dflash(dtype=dtype, **(draft or {}))
    values = {"name": "dflash", "block_size": model.config.block_size, "loss_decay": 2.0, **section}
    return DFlashStrategy(DFlashSection(**values), model, *frozen_matrices(dtype), seed=3)


def test_default_layers() -> None:
    assert dflash_layers(36, 5) == (1, 9, 17, 25, 33)
    assert [dflash_layers(n, 5) for n in (24, 28, 30, 32, 48, 64)] == [
        (1, 6, 11, 16, 21), (1, 7, 13, 19, 25), (1, 8, 14, 20, 27), (1, 8, 15, 22, 29), (1, 12, 23, 34, 45), (1, 16, 31, 46, 61),
    ]  # fmt: skip
    assert dflash_layers(30, 1) == (15,)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("draft", [{}, WINDOW], ids=["full", "sliding"])
def test_splitting_a_batch_does_not_change_the_gradient(loss: str, draft: dict[str, Any]) -> None:
    strategy = _strategy(loss=loss, draft=draft, num_anchors=6)
    samples = random_features([21, 13, 9, 17], dtype=torch.float64)
    whole = gradient(strategy, [samples])
    assert_same(gradient(strategy, [samples[:1], samples[1:]]), whole, RTOL)
    assert_same(gradient(strategy, [[sample] for sample in samples]), whole, RTOL)
    assert all(grad.abs().sum() > 0 for grad in whole[1].values())


def _plain_loss(strategy: DFlashStrategy, sample: dict[str, torch.Tensor], loss: str, gamma: float) -> float:
    """The definition, block by block and slot by slot: decayed cross entropy, or D-PACE with α = ½ per supervised slot."""
    batch, draft = strategy.collate([sample]), strategy.draft
    embedding, head = frozen_matrices()
    with torch.no_grad():
        context = draft.context(batch["context_states"], batch["context_positions"])
        hidden = draft.blocks(context, batch["anchors"], batch["anchor_ids"], batch["starts"], embedding)
        log_q = (hidden @ head.T).log_softmax(-1)
    ids, mask = sample["input_ids"].tolist(), sample["loss_mask"].tolist()
    total = norm = 0.0
    for n, anchor in enumerate(batch["anchors"].tolist()):
        ces: list[float] = []
        for j in range(1, draft.config.block_size):
            if anchor + j >= len(ids) or not mask[anchor + j]:
                break
            ces.append(-float(log_q[n, j, ids[anchor + j]]))
        reached = [math.prod(0.5 * math.exp(-ce) + 0.5 for ce in ces[: j + 1]) for j in range(len(ces))]
        for j, ce in enumerate(ces):
            decay = math.exp(-j / gamma)
            ahead = sum(reached[j:])
            weights = {
                "ce": decay,
                "dpace": ahead,
                "dpace_cumulative": reached[j],
                "dpace_continuation": ahead / reached[j],
            }
            total += weights[loss] * ce
            norm += decay if loss == "ce" else 1.0
    return total / norm


@pytest.mark.parametrize("loss", LOSSES)
def test_loss_is_that_of_the_definition(loss: str) -> None:
    sample = random_features([24], dtype=torch.float64)[0]
    sample["loss_mask"][15] = 0
    strategy = _strategy(loss=loss, loss_decay=1.5, num_anchors=100, chunk_blocks=3)
    assert gradient(strategy, [[sample]])[0] == pytest.approx(_plain_loss(strategy, sample, loss, 1.5), rel=1e-6)


def test_dpace_per_sequence_divides_by_sequences() -> None:
    samples = random_features([12, 2, 15], dtype=torch.float64)  # the second has no block
    token, sequence = (_strategy(loss="dpace", dpace_norm=norm) for norm in ("token", "sequence"))
    rows = float(token.prepare(token.collate(samples)).denominators["ce"])
    assert float(sequence.prepare(sequence.collate(samples)).denominators["ce"]) == 2.0
    assert gradient(sequence, [samples])[0] == pytest.approx(gradient(token, [samples])[0] * rows / 2)


@pytest.mark.parametrize("loss", ["ce", "dpace"])
def test_padding_does_not_change_the_gradient(loss: str) -> None:
    strategy = _strategy(loss=loss)
    short = random_features([12], seed=1, dtype=torch.float64)
    unsupervised = random_features([40], seed=2, dtype=torch.float64)
    unsupervised[0]["loss_mask"].zero_()
    assert_same(gradient(strategy, [short + unsupervised]), gradient(strategy, [short]))
    assert_same(gradient(strategy, [unsupervised + short]), gradient(strategy, [short]))


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("chunk_blocks", [1, 5])
def test_chunk_size_does_not_change_the_gradient(loss: str, chunk_blocks: int) -> None:
    samples = random_features([21, 13], dtype=torch.float64)
    whole = gradient(_strategy(loss=loss), [samples])
    assert_same(gradient(_strategy(loss=loss, chunk_blocks=chunk_blocks), [samples]), whole)


def test_gradient_of_the_whole_objective_is_exact() -> None:
    """D-PACE's weights count as constants, so only the plain loss has its own finite differences."""
    assert_exact(_strategy(draft=WINDOW, num_anchors=5), random_features([11, 8], dtype=torch.float64), picks=0)


def test_dpace_gradient_is_that_of_fixed_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    from specfleet.trainer.strategies.dflash import objective

    strategy, samples = _strategy(loss="dpace"), random_features([14], dtype=torch.float64)
    kept: list[torch.Tensor] = []
    weigh = objective.dpace_weights

    def record(*arguments: Any) -> torch.Tensor:
        kept.append(weigh(*arguments))
        return kept[-1]

    monkeypatch.setattr(objective, "dpace_weights", record)
    found = gradient(strategy, [samples])
    monkeypatch.setattr(objective, "dpace_weights", lambda *arguments: kept[0])
    parameter = strategy.draft.fc.weight.data.view(-1)
    losses = []
    for sign in (1, -1):
        parameter[5] += sign * 1e-5
        losses.append(gradient(strategy, [samples])[0])
        parameter[5] -= sign * 1e-5
    assert (losses[0] - losses[1]) / 2e-5 == pytest.approx(float(found[1]["fc.weight"].view(-1)[5]), rel=1e-5)


@pytest.mark.parametrize("loss", ["ce", "dpace"])
@pytest.mark.parametrize("how", ["masked", "too short"])
def test_a_batch_without_rows_touches_every_parameter_with_zero(loss: str, how: str) -> None:
    samples = random_features([9, 6] if how == "masked" else [1, 1], prompt=0)
    if how == "masked":
        for sample in samples:
            sample["loss_mask"].zero_()
    assert_zero_but_touched(_strategy(torch.float32, loss=loss), samples)


@pytest.mark.parametrize("draft", [{}, WINDOW], ids=["full", "sliding"])
def test_no_slot_sees_what_it_is_to_guess(draft: dict[str, Any]) -> None:
    """A block depends on its anchor's token and on states strictly before it, and on nothing else."""
    strategy, anchor = _strategy(draft=draft, num_anchors=100), 6
    samples = random_features([16], dtype=torch.float64)
    embedding, _ = frozen_matrices()

    def outputs(changed: dict[str, torch.Tensor]) -> torch.Tensor:
        batch = strategy.collate([{**samples[0], **changed}])
        model = strategy.draft
        context = model.context(batch["context_states"], batch["context_positions"])
        hidden = model.blocks(context, batch["anchors"], batch["anchor_ids"], batch["starts"], embedding)
        return hidden[batch["anchors"].tolist().index(anchor)]

    before = outputs({})
    states, ids = samples[0]["aux_states"].clone(), samples[0]["input_ids"].clone()
    states[anchor:] += 1e3
    ids[:anchor] = 300
    ids[anchor + 1 :] = 301
    assert torch.equal(outputs({"aux_states": states, "input_ids": ids}), before)
    for changed in ("aux_states", "input_ids"):
        value = samples[0][changed].clone()
        value[anchor - 1 if changed == "aux_states" else anchor] += 1
        assert not torch.equal(outputs({changed: value}), before)


def test_slots_of_a_block_see_one_another_only_as_layers_allow() -> None:
    """In a full layer all slots move when the anchor's token does; in a sliding one the block is causal."""
    draft = tiny_dflash(dtype=torch.float64, num_layers=1, layer_types=["sliding_attention"], sliding_window=6)
    embedding, _ = frozen_matrices()
    context = [(torch.zeros(0, 2, 8, dtype=torch.float64),) * 2]
    anchors = starts = torch.tensor([0])
    changed = embedding.clone()
    changed[MASK] += 1.0
    a, b = (draft.blocks(context, anchors, torch.tensor([5]), starts, matrix)[0] for matrix in (embedding, changed))
    assert torch.equal(a[0], b[0])  # the anchor's slot sees no mask token
    assert not (a[1:] == b[1:]).all(-1).any()
    full = tiny_dflash(dtype=torch.float64, num_layers=1)
    a, b = (full.blocks(context, anchors, torch.tensor([5]), starts, matrix)[0] for matrix in (embedding, changed))
    assert not (a == b).all(-1).any()


def test_metrics_are_pairs_over_blocks_and_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft that always says token 9, on a text whose tokens are 9 but for one."""
    strategy = _strategy(torch.float32, num_anchors=100)
    samples = random_features([12, 1])
    samples[0]["input_ids"][:] = 9
    samples[0]["input_ids"][8] = 3
    monkeypatch.setattr(strategy.draft, "blocks", lambda context, anchors, *rest: torch.ones(len(anchors), 5, 32))
    strategy._head.zero_()
    strategy._head[9] = 1.0
    metrics = strategy.objective(strategy.prepare(strategy.collate(samples))).metrics
    # Anchors 3 … 10, guesses a+1 … a+4 inside the text: 4 for a ≤ 7, then 3, 2, 1.
    pairs = {name: [float(x) for x in pair] for name, pair in metrics.items()}
    assert pairs["acc_0"] == [7.0, 8.0]
    assert pairs["acc_3"] == [4.0, 5.0]
    assert pairs["acc"] == [26.0 - 4.0, 26.0]
    # Runs of right guesses: a = 3: 4, 4: 3, 5: 2, 6: 1, 7: 0, 8: 3, 9: 2, 10: 1.
    assert pairs["tau_greedy"] == [8.0 + 16.0, 8.0]
    assert pairs["skipped_samples"] == [1.0, 2.0]
    assert pairs["ce"][1] == 26.0


def test_new_anchors_every_visit() -> None:
    strategy, samples = _strategy(torch.float32, num_anchors=4), random_features([60])
    first = strategy.collate(samples)["anchors"]
    assert torch.equal(first, strategy.collate(samples)["anchors"])
    samples[0]["visit"] = torch.tensor([1, 0])
    assert not torch.equal(first, strategy.collate(samples)["anchors"])


def test_identity_names_what_a_resumed_run_must_share() -> None:
    base = _strategy(torch.float32).identity()
    assert (base["strategy"], base["layers"], base["mask_token_id"]) == ("dflash", "1,2,3", str(MASK))
    for changes in ({"loss": "dpace"}, {"loss_decay": None}, {"num_anchors": 5}):
        assert _strategy(torch.float32, **changes).identity() != base
    assert all(isinstance(value, str) for value in base.values())


def test_runs_in_bf16_close_to_fp32() -> None:
    samples = random_features([24, 15])
    exact, _ = gradient(_strategy(torch.float32), [samples])
    low, found = gradient(_strategy(torch.bfloat16), [samples])
    assert low == pytest.approx(exact, rel=2e-2)
    assert all(grad.isfinite().all() for grad in found.values())
