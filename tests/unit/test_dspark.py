"""DSpark: labels and teachers of slots, the three Markov heads, the whole objective against a plain one, the confidence."""

import pytest
import torch
from fixtures.blocks import frozen_matrices, random_features
from fixtures.corrected import dspark_strategy, tiny_dspark, training_logits
from fixtures.objective import assert_exact, assert_same, assert_zero_but_touched, gradient
from torch.nn import functional

from specfleet.contracts.errors import ConfigError
from specfleet.drafts.dspark import MARKOV_HEADS, DSparkDraft, MarkovHead
from specfleet.trainer.strategies.anchors import contiguous_mask, slot_decay, slot_labels
from specfleet.trainer.strategies.corrected_batch import previous_tokens, run_blocks
from specfleet.trainer.strategies.dspark import DSparkStrategy
from specfleet.trainer.strategies.dspark.batch import by_teacher
from specfleet.trainer.strategies.eagle_setup import check_final_state
from specfleet.wire.records_pb2 import CaptureContract


def _strategy(
    dtype: torch.dtype = torch.float64, *, draft: dict[str, object] | None = None, **section: object
) -> DSparkStrategy:
    return dspark_strategy(tiny_dspark(dtype=dtype, **(draft or {})), *frozen_matrices(dtype), **section)


def test_labels_previous_tokens_and_teachers_of_a_block() -> None:
    """Anchor 2 of five tokens, three slots: labels x_3, x_4 and none; tokens before x_2, x_3, x_4; teachers H_2, H_3."""
    ids = torch.arange(100, 105)
    anchor = torch.tensor([2])
    labels, valid = slot_labels(ids[None], torch.ones(1, 5), torch.tensor([0]), anchor, 3, sample_from_anchor=True)
    assert labels.tolist() == [[103, 104, 0]]
    assert valid.tolist() == [[True, True, False]]
    tensors = {"anchor_ids": ids[anchor], "labels": labels}
    assert previous_tokens(tensors, tiny_dspark(block_size=3).config).tolist() == [[102, 103, 104]]
    sample = random_features([5], prompt=0)[0]
    sample["loss_mask"][:2] = 0  # the only eligible anchors are 2 and 3
    batch = _strategy(torch.float32, draft={"block_size": 3}).collate([sample])
    assert batch["anchors"].tolist() == [2, 3]
    # Both blocks ask for H_3: the first for its second slot, the second for its anchor.
    torch.testing.assert_close(batch["teacher_states"], sample["final_state"][2:4])
    assert batch["rows"].tolist() == [0, 1, 3]
    assert batch["teacher_of"].tolist() == [0, 1, 1]


def test_slots_behind_a_gap_do_not_count() -> None:
    mask = torch.tensor([[True, False, True]])
    assert contiguous_mask(mask, 0).tolist() == [[True, False, False]]
    assert float(slot_decay(7, 0, 4.0).sum()) == pytest.approx(3.735212)


def test_teachers_of_many_samples_are_told_apart() -> None:
    samples = random_features([12, 9, 3, 15])
    batch = _strategy(torch.float32, num_anchors=4).collate(samples)
    block, slot = batch["rows"] // 4, batch["rows"] % 4
    for row, teacher in enumerate(batch["teacher_of"].tolist()):
        owner, position = batch["sample"][block[row]], batch["anchors"][block[row]] + slot[row]
        assert torch.equal(batch["teacher_states"][teacher], samples[owner]["final_state"][position])
    assert len(batch["teacher_states"]) < len(batch["rows"])
    assert batch["teacher_of"].tolist() == sorted(batch["teacher_of"].tolist())


@pytest.mark.parametrize("anchors", [[0, 3, 4, 9], [5], []])
def test_slots_are_sorted_by_teacher_and_then_by_block(anchors: list[int]) -> None:
    place, slots = torch.tensor(anchors, dtype=torch.int64), 4
    valid = torch.rand(len(place), slots, generator=torch.Generator().manual_seed(2)) < 0.7
    rows = valid.flatten().nonzero().flatten()
    found, shared = by_teacher(rows, place, slots, 13)
    teachers = [anchors[row // slots] + row % slots for row in rows.tolist()]
    assert found.tolist() == [row for _, row in sorted(zip(teachers, rows.tolist(), strict=True))]
    assert shared.tolist() == [teachers.count(at) for at in range(13)]


def _plain_head(head: MarkovHead, kind: str, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Codes of one block [I, r] from the formulas."""
    state, codes = torch.zeros(6), []
    for h, y in zip(hidden, ids, strict=True):
        w = head.markov_w1.weight[y]
        if kind == "vanilla":
            codes.append(w)
        elif kind == "gated":
            codes.append(torch.sigmoid(head.gate_proj.weight @ torch.cat((h, w)) + head.gate_proj.bias) * w)
        else:
            g, u, o = (head.joint_proj.weight @ torch.cat((state, w, h)) + head.joint_proj.bias).split(6)
            state = torch.sigmoid(g) * state + (1 - torch.sigmoid(g)) * torch.tanh(u)
            codes.append(torch.tanh(o))
    return torch.stack(codes)


@pytest.mark.parametrize("kind", MARKOV_HEADS)
@torch.no_grad()
def test_markov_heads(kind: str) -> None:
    draft = tiny_dspark(markov_head=kind)
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(3, 4, 32, generator=generator)
    ids = torch.randint(0, 384, (3, 4), generator=generator)
    codes = draft.codes(hidden, ids, torch.empty(0))
    for block in range(3):
        torch.testing.assert_close(codes[block], _plain_head(draft.markov_head, kind, hidden[block], ids[block]))
    state = None
    for index in range(4):
        code, state = draft.code(index, hidden[:, index], ids[:, index], state, torch.empty(0))
        assert code is not None
        torch.testing.assert_close(code, codes[:, index])


@pytest.mark.parametrize("kind", MARKOV_HEADS)
def test_no_slot_sees_what_it_is_to_guess(kind: str) -> None:
    """Guess k knows the states before the anchor and, of the text, x_a and x_{a+k} (rnn: everything between them too)."""
    strategy = _strategy(draft={"markov_head": kind}, num_anchors=100)
    samples = random_features([16], dtype=torch.float64)
    tensors, before = training_logits(strategy, samples)
    block = 2
    anchor = int(tensors["anchors"][block])
    for offset in range(1, 5):
        samples[0]["input_ids"][anchor + offset] += 1
        _, after = training_logits(strategy, samples)
        samples[0]["input_ids"][anchor + offset] -= 1
        changed = [not torch.equal(before[block, k], after[block, k]) for k in range(4)]
        assert changed == [k == offset or (kind == "rnn" and k > offset) for k in range(4)]
    samples[0]["aux_states"][anchor:] += 1.0
    samples[0]["final_state"] += 1.0
    assert torch.equal(training_logits(strategy, samples)[1][block], before[block])


def _plain_gradient(
    strategy: DSparkStrategy, samples: list[dict[str, torch.Tensor]]
) -> tuple[float, dict[str, torch.Tensor]]:
    """The objective written plainly, block by block and slot by slot."""
    prepared = strategy.prepare(strategy.collate(samples))
    tensors, draft = prepared.tensors, strategy.draft
    embedding, head = strategy._embedding, strategy._head
    hidden = run_blocks(draft, tensors, embedding)
    previous = previous_tokens(tensors, draft.config)
    z = hidden @ head.T + draft.codes(hidden, previous, embedding) @ draft.correction_VE.T
    chance = draft.confidence(hidden, previous)
    total, norm = torch.zeros((), dtype=z.dtype), 0.0
    for n, a in enumerate(tensors["anchors"].tolist()):
        sample = samples[int(tensors["sample"][n])]
        for k in range(draft.config.block_size):
            if a + k + 1 >= len(sample["input_ids"]) or not sample["loss_mask"][a + k + 1]:
                break
            weight = float(torch.exp(torch.tensor(-k / 4.0)))
            p = (sample["final_state"][a + k] @ head.T).softmax(-1)
            l1 = (z[n, k].softmax(-1) - p).abs().sum()
            ce = functional.cross_entropy(z[n, k], sample["input_ids"][a + k + 1].long())
            bce = functional.binary_cross_entropy_with_logits(chance[n, k], (1 - l1 / 2).detach())
            total, norm = total + weight * (0.1 * ce + 0.9 * l1 + bce), norm + weight
    draft.zero_grad(set_to_none=True)
    (total / norm).backward()
    return float(total.detach()) / norm, {
        name: p.grad.clone() for name, p in draft.named_parameters() if p.grad is not None
    }


@pytest.mark.parametrize("kind", MARKOV_HEADS)
def test_objective_equals_the_plain_one(kind: str) -> None:
    strategy = _strategy(draft={"markov_head": kind}, num_anchors=4)
    samples = random_features([13, 8], dtype=torch.float64)
    samples[0]["loss_mask"][8] = 0
    assert_same(gradient(strategy, [samples]), _plain_gradient(strategy, samples), rtol=1e-6)


@pytest.mark.parametrize("kind", ["gated", "rnn"])
def test_gradient_of_what_is_guessed_is_exact(kind: str) -> None:
    """Without the confidence term: its target is a function of the parameters that the gradient rightly ignores."""
    strategy = _strategy(draft={"markov_head": kind, "num_layers": 1}, num_anchors=2, confidence_weight=0.0)
    assert_exact(strategy, random_features([9], dtype=torch.float64), picks=1)


def test_splitting_and_padding_do_not_change_the_gradient() -> None:
    strategy = _strategy(num_anchors=4)
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


@pytest.mark.parametrize("kind", MARKOV_HEADS)
@pytest.mark.parametrize("how", ["masked", "too short"])
def test_a_batch_without_rows_touches_every_parameter_with_zero(kind: str, how: str) -> None:
    samples = random_features([9, 6] if how == "masked" else [1, 1], prompt=0)
    for sample in samples:
        sample["loss_mask"].fill_(how != "masked")
    assert_zero_but_touched(_strategy(torch.float32, draft={"markov_head": kind}), samples)


def test_metrics_of_a_draft_that_equals_its_teacher() -> None:
    """Everything is accepted and the confidence is as wrong as it is low."""
    strategy = _strategy(torch.float32)
    samples = random_features([12])
    tensors = strategy.prepare(strategy.collate(samples)).tensors
    draft = strategy.draft
    with torch.no_grad():
        draft.markov_head.markov_w2.weight.zero_()
        for parameter in draft.confidence_head.parameters():
            parameter.zero_()
        hidden = run_blocks(draft, tensors, strategy._embedding)
    block, slot = tensors["rows"] // 4, tensors["rows"] % 4
    prepared = strategy.prepare(strategy.collate(samples))
    # Every slot gets a teacher of its own, in the state the slot itself has.
    prepared.tensors["teacher_of"] = torch.arange(len(block))
    prepared.tensors["teacher_states"] = hidden[block, slot]
    prepared.tensors["teacher_bounds"] = prepared.tensors["row_bounds"]
    metrics = {name: float(a / b) for name, (a, b) in strategy.objective(prepared).metrics.items()}
    assert metrics["l1"] == pytest.approx(0.0, abs=1e-5)
    assert metrics["alpha"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["teacher_agreement"] == 1.0
    assert metrics["draft_top1"] == pytest.approx(metrics["teacher_top1"], abs=1e-5)
    assert metrics["confidence_error"] == pytest.approx(0.5, abs=1e-5)
    assert metrics["confidence_bias"] == pytest.approx(-0.5, abs=1e-5)
    lengths = torch.bincount(block, minlength=len(hidden)).float()
    assert metrics["tau_prob"] == pytest.approx(float(1 + lengths.mean()), abs=1e-4)
    chains = sum(0.5**k - 1 for n in lengths.long().tolist() for k in range(1, n + 1))
    assert metrics["confidence_chain_bias"] == pytest.approx(chains / len(block), abs=1e-4)


def test_without_a_confidence_head_there_is_no_such_term() -> None:
    strategy = _strategy(torch.float32, draft={"confidence_head": False})
    objective = strategy.objective(strategy.prepare(strategy.collate(random_features([12]))))
    assert objective.numerators.keys() == strategy.term_weights.keys() == {"slots"}
    assert not any(name.startswith("confidence") for name in objective.metrics)
    with pytest.raises(ConfigError, match="no confidence head"):
        strategy.draft.confidence(torch.zeros(1, 32), torch.zeros(1, dtype=torch.int64))


def test_a_contract_without_the_final_state_is_refused() -> None:
    with pytest.raises(ConfigError, match="dspark needs final_state post_norm, the contract says 'none'"):
        check_final_state("dspark", CaptureContract(final_state="none"))


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"sample_from_anchor": False}, "anchor slot"),
        ({"markov_head": "lstm"}, "vanilla, gated, rnn"),
        ({"markov_rank": 0}, "at least 1"),
    ],
)
def test_configurations_that_make_no_sense(changes: dict[str, object], part: str) -> None:
    with pytest.raises(ConfigError, match=part) as caught:
        tiny_dspark(**changes)
    assert caught.value.code == "SF-DRAFT-CONFIG"


def test_identity_names_what_a_resumed_run_must_share() -> None:
    base = _strategy(torch.float32).identity()
    assert (base["strategy"], base["markov_head"], base["markov_rank"]) == ("dspark", "vanilla", "6")
    assert _strategy(torch.float32, l1_weight=0.5).identity() != base
    assert all(isinstance(value, str) for value in base.values())


def test_runs_in_bf16_close_to_fp32() -> None:
    samples = random_features([24, 15])
    exact, _ = gradient(_strategy(torch.float32), [samples])
    low, grads = gradient(_strategy(torch.bfloat16), [samples])
    assert low == pytest.approx(exact, rel=2e-2)
    assert all(grad.isfinite().all() for grad in grads.values())


def test_fresh_heads_start_small() -> None:
    torch.manual_seed(0)
    draft = DSparkDraft.from_config(tiny_dspark(markov_head="gated").config.to_dict())
    assert draft.markov_head.markov_w1.weight.std() < 0.03
    assert not draft.confidence_head.proj.bias.any()
    assert not draft.markov_head.gate_proj.bias.any()
