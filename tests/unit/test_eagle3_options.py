"""Options of EAGLE-3: LK losses, the target's head, EAGLE-3.1, rollout schedules, experts."""

import json
from pathlib import Path

import pytest
import torch
from fixtures.eagle3 import LAYERS, random_samples, tiny_draft, tiny_strategy
from fixtures.objective import assert_exact, assert_same, assert_zero_but_touched, gradient
from safetensors.torch import load_file

from specfleet.contracts.errors import ConfigError, ExportError
from specfleet.drafts.eagle3 import Eagle3Draft
from specfleet.drafts.export import export_draft, load_export
from specfleet.drafts.layers import ExpertMLP
from specfleet.target.hf import HFTarget
from specfleet.trainer.strategies.eagle3 import Eagle3Strategy
from specfleet.trainer.strategies.eagle3.schedule import rollout_length

F64 = torch.float64
TARGET_HEAD = {"own_head": False, "draft_vocab_size": 384}


def _matrices(dtype: torch.dtype = F64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    embedding, head = (torch.randn(384, 32, generator=generator, dtype=F64).to(dtype) for _ in range(2))
    return embedding, head


def _strategy(draft: Eagle3Draft | None = None, dtype: torch.dtype = F64, **section: object) -> Eagle3Strategy:
    embedding, head = _matrices(dtype)
    return tiny_strategy(draft or tiny_draft(dtype=dtype), embedding, head, **section)


# --- LK ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("section", [{"lk": "alpha"}, {"lk": "lambda"}], ids=["alpha", "lambda"])
def test_lk_losses_keep_the_reduction_contract(section: dict[str, object]) -> None:
    strategy = _strategy(ttt_length=4, **section)
    samples = random_samples([21, 13, 9], dtype=F64)
    whole = gradient(strategy, [samples])
    assert_same(gradient(strategy, [samples[:1], samples[1:]]), whole)
    strategy.chunk_rows = 5
    assert_same(gradient(strategy, [samples]), whole)
    assert whole[0] != pytest.approx(gradient(_strategy(ttt_length=4), [samples])[0])


def test_alpha_loss_has_the_exact_gradient() -> None:
    assert_exact(_strategy(ttt_length=3, lk="alpha"), random_samples([11, 8], dtype=F64))


def test_lambda_of_the_batch_follows_its_mean() -> None:
    """Not invariant to splitting, by its definition; equal to per-token λ when there is one row per step."""
    draft = tiny_draft(dtype=F64, draft_vocab_size=384)  # every row counts
    token, batch = (_strategy(draft, ttt_length=1, lk="lambda", lk_lambda=name) for name in ("token", "batch"))
    one, many = (random_samples([length], dtype=F64) for length in (5, 9))
    assert float(batch.prepare(batch.collate(one)).denominators["step_0"]) == 1.0
    assert_same(gradient(batch, [one]), gradient(token, [one]))
    assert gradient(batch, [many])[0] != pytest.approx(gradient(token, [many])[0])


@pytest.mark.parametrize("section", [{}, {"lk": "alpha"}, {"lk": "lambda"}])
def test_a_batch_without_rows_is_zero(section: dict[str, object]) -> None:
    samples = random_samples([9, 2])
    for sample in samples:
        sample["loss_mask"].zero_()
    assert_zero_but_touched(_strategy(dtype=torch.float32, **section), samples)


def test_both_captured_facts_replace_the_full_head_of_an_lk_run() -> None:
    embedding, head = _matrices()
    samples = random_samples([19, 11], dtype=F64)
    expected = gradient(_strategy(lk="lambda"), [samples])
    for sample in samples:
        logits = sample["final_state"] @ head.T
        sample["teacher_argmax"], sample["teacher_lse"] = logits.argmax(-1).int(), logits.logsumexp(-1)
    lean = tiny_strategy(tiny_draft(dtype=F64), embedding, head, full=False, lk="lambda")
    assert_same(gradient(lean, [samples]), expected)


def test_acceptance_metrics_are_those_of_the_definition() -> None:
    """α over every supervised row, in or out of the draft vocabulary; τ from the products along each rollout."""
    strategy = _strategy(ttt_length=3)
    embedding, head = _matrices()
    sample = random_samples([16], dtype=F64)[0]
    prepared = strategy.prepare(strategy.collate([sample]))
    metrics = strategy.objective(prepared).metrics
    draft, ids = strategy.draft, sample["input_ids"].long()[None]
    assert isinstance(draft, Eagle3Draft)
    rows = [torch.arange(2, 16 - 2 - step) for step in range(3)]
    with torch.no_grad():
        outputs = draft.rollout(ids, sample["aux_states"][None], embedding, rows)
        guesses = [draft.logits(output).softmax(-1) for output in outputs]
    overlap = torch.zeros(3, 16, dtype=F64)
    for step, q in enumerate(guesses):
        p = (sample["final_state"][rows[step] + 1 + step] @ head.T).softmax(-1)[:, draft.t2d]
        overlap[step, rows[step]] = torch.minimum(p, q).sum(-1)
        numerator, denominator = metrics[f"alpha_{step}"]
        assert float(numerator) == pytest.approx(float(overlap[step].sum()), rel=1e-5)
        assert float(denominator) == len(rows[step])
    tau = 1 + overlap[:, rows[0]].cumprod(0).sum(0).mean()
    assert float(metrics["tau_prob"][0] / metrics["tau_prob"][1]) == pytest.approx(float(tau), rel=1e-5)


def test_three_guesses_accepted_with_probability_point_eight(monkeypatch: pytest.MonkeyPatch) -> None:
    """α = .8 at each of three steps: a full rollout is worth 1 + .8 + .64 + .512 = 2.952 tokens.

    The target says [.5, .3, .15, .05] everywhere, the draft knows the first two of these tokens and imitates them.
    """
    draft = tiny_draft(dtype=F64, draft_vocab_size=2)
    head = torch.zeros(384, 32, dtype=F64)
    head[:, 0] = -100.0
    head[[0, 192, 1, 2], 0] = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=F64).log()  # draft ids 0, 1 are 0 and 192
    strategy = tiny_strategy(draft, torch.zeros(384, 32, dtype=F64), head, ttt_length=3)
    monkeypatch.setattr(draft, "head_input", torch.ones_like)
    with torch.no_grad():
        draft.lm_head.weight.copy_(torch.tensor([[0.625], [0.375]], dtype=F64).log().expand(2, 32) / 32)
    sample = random_samples([40], dtype=F64)[0]
    sample["final_state"] = torch.eye(32, dtype=F64)[:1].expand(40, 32)
    metrics = strategy.objective(strategy.prepare(strategy.collate([sample]))).metrics
    ratio = {name: float(numerator / denominator) for name, (numerator, denominator) in metrics.items()}
    assert [ratio[f"alpha_{step}"] for step in range(3)] == pytest.approx([0.8] * 3)
    rows = 36.0  # of which the last one has no second guess inside the text, the last two no third
    assert ratio["tau_prob"] == pytest.approx(2.952 - (0.64 + 2 * 0.512) / rows)


# --- the target's head ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> HFTarget:
    return HFTarget.load(tiny_target, LAYERS, dtype="float32")


@pytest.mark.parametrize(
    "switches",
    [TARGET_HEAD, {"experts": 3, "experts_per_token": 2}, {"fc_norm": True}, {"norm_output": True}],
    ids=["target-head", "experts", "fc-norm", "norm-output"],
)
@torch.no_grad()
def test_training_logits_equal_decoding_logits(target: HFTarget, switches: dict[str, object]) -> None:
    draft = tiny_draft(seed=1, **switches)
    text = torch.randint(0, 384, (20,), generator=torch.Generator().manual_seed(5)).tolist()
    item = target.capture([text])[0]
    assert isinstance(item, dict)
    aux, steps = item["aux_states"], 5
    rows = torch.arange(3, 20 - 1 - steps)
    outputs = draft.rollout(torch.tensor([text]), aux[None], target.embedding_VH, [rows] * steps)
    drafter, done = draft.drafter(target.embedding_VH, target.head_VH), 0
    for place, t in enumerate(rows.tolist()):
        drafter.extend(text[done + 1 : t + 2], aux[done : t + 1])
        done = t + 1
        _, decoded = drafter.chain(steps, forced=text[t + 2 : t + 2 + steps])
        for step in range(steps):
            trained = draft.logits(outputs[step], target.head_VH)[place]
            torch.testing.assert_close(trained, decoded[step], rtol=0, atol=1e-4)


def test_with_the_targets_head_nothing_of_it_is_saved_or_trained(tmp_path: Path) -> None:
    embedding, head = _matrices(torch.float32)
    draft = tiny_draft(**TARGET_HEAD)
    assert not {"lm_head.weight", "d2t", "t2d"} & draft.state_dict().keys()
    # Rows beyond the vocabulary are padding of the target's checkpoint.
    assert draft.head(torch.cat((head, head))).shape == (384, 32)
    with pytest.raises(ConfigError, match="pass head_VH") as caught:
        draft.drafter(embedding)
    assert caught.value.code == "SF-DRAFT-HEAD"
    with pytest.raises(ConfigError, match="draft_vocab_size 128"):
        tiny_draft(own_head=False)
    for layout in ("sglang", "vllm"):
        export_draft(draft, layout, tmp_path / layout, dtype=torch.float32)
        assert json.loads((tmp_path / layout / "config.json").read_text())["draft_vocab_size"] is None
        assert not {"lm_head.weight", "d2t", "t2d"} & load_file(tmp_path / layout / "model.safetensors").keys()
        loaded = load_export(tmp_path / layout)
        assert loaded.config == draft.config
        torch.manual_seed(0)
        ids, aux = torch.randint(0, 384, (1, 9)), torch.randn(1, 9, 96)
        ours, theirs = (d.chain_hits(ids, aux, embedding, 3, head_VH=head) for d in (draft, loaded))
        assert torch.equal(ours, theirs)


def test_training_with_the_targets_head() -> None:
    embedding, head = _matrices()
    draft = tiny_draft(dtype=F64, **TARGET_HEAD)
    own = tiny_draft(dtype=F64, draft_vocab_size=384)
    own.load_state_dict(draft.state_dict(), strict=False)
    own.lm_head.weight.data.copy_(head)
    samples = random_samples([14, 9], dtype=F64)
    section = {"head": "target", "draft_vocab_size": 0, "ttt_length": 3}
    strategy = tiny_strategy(draft, embedding, head, **section)
    loss, found = gradient(strategy, [samples])
    expected_loss, expected = gradient(tiny_strategy(own, embedding, head, ttt_length=3), [samples])
    del expected["lm_head.weight"]
    assert_same((loss, found), (expected_loss, expected))


# --- EAGLE-3.1 --------------------------------------------------------------------------------------------------------


def test_norm_output_selects_what_is_fed_back_and_never_what_the_head_sees() -> None:
    plain, normed = tiny_draft(), tiny_draft(norm_output=True)
    output = torch.randn(4, 32, generator=torch.Generator().manual_seed(1))
    assert torch.equal(plain.feedback(output), output)
    assert torch.equal(normed.feedback(output), normed.norm(output))
    for draft in (plain, normed):
        assert torch.equal(draft.head_input(output), draft.norm(output))


def test_legacy_switch_reproduces_v030_and_cannot_be_exported(tmp_path: Path) -> None:
    """There norm_output true trained plain EAGLE-3, and false sent the un-normed state into the head."""
    output = torch.randn(4, 32, generator=torch.Generator().manual_seed(1))
    on, off = (tiny_draft(norm_output=flag, legacy_v030=True) for flag in (True, False))
    assert torch.equal(on.feedback(output), output)
    assert torch.equal(on.head_input(output), on.norm(output))
    assert torch.equal(off.head_input(output), output)
    with pytest.raises(ExportError, match="legacy_v030"):
        export_draft(on, "sglang", tmp_path / "out")


# --- schedules --------------------------------------------------------------------------------------------------------


def test_curriculum_grows_over_the_first_half() -> None:
    lengths = [rollout_length("curriculum", 7, step, 140) for step in range(1, 141)]
    assert lengths[0] == 1
    assert lengths == sorted(lengths)
    assert [lengths.count(length) for length in range(1, 7)] == [10] * 6
    assert set(lengths[60:]) == {7}
    assert [rollout_length("curriculum", 3, step, 1) for step in (1, 2)] == [1, 3]
    assert rollout_length("constant", 7, 1, 140) == 7


def test_sampled_lengths_cover_the_range() -> None:
    torch.manual_seed(0)
    assert {rollout_length("sampled", 4, 1, 1) for _ in range(100)} == {1, 2, 3, 4}


def test_a_shorter_rollout_trains_the_first_steps_exactly() -> None:
    """At the first step of a curriculum the loss is that of step 0 alone, and the later terms are zero."""
    samples = random_samples([17, 9], dtype=F64)
    strategy = _strategy(ttt_length=4, ttt_schedule="curriculum")
    strategy._total_steps = 80
    strategy.begin_step(1)
    short = gradient(strategy, [samples])
    prepared = strategy.prepare(strategy.collate(samples))
    objective = strategy.objective(prepared)
    assert set(objective.numerators) == set(prepared.denominators) == set(strategy.term_weights)
    assert float(prepared.denominators["step_1"]) == float(objective.numerators["step_1"]) == 0.0
    assert "loss_1" not in objective.metrics
    assert_same(short, gradient(_strategy(ttt_length=1), [samples]))
    strategy.begin_step(41)
    assert_same(gradient(strategy, [samples]), gradient(_strategy(ttt_length=4), [samples]))


# --- experts ----------------------------------------------------------------------------------------------------------


def test_experts_are_mixed_by_their_renormalised_gates() -> None:
    torch.manual_seed(0)
    mlp, x = ExpertMLP(8, 12, 4, 2), torch.randn(5, 8)
    gates = mlp.gate(x).softmax(-1)
    for row in range(5):
        top = gates[row].topk(2)
        expected = sum(
            w * mlp.experts[int(i)](x[row]) for w, i in zip(top.values / top.values.sum(), top.indices, strict=True)
        )
        torch.testing.assert_close(mlp(x)[row], expected)
    mlp(x[:1]).sum().backward()
    assert all(parameter.grad is not None for parameter in mlp.parameters())


def test_experts_train_and_are_not_exported(tmp_path: Path) -> None:
    draft = tiny_draft(dtype=F64, experts=3)
    assert_exact(_strategy(draft, ttt_length=2, experts=3), random_samples([9], dtype=F64), picks=1)
    with pytest.raises(ExportError, match="3 experts"):
        export_draft(draft, "sglang", tmp_path / "out")
