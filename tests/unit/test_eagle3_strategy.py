"""The EAGLE-3 objective as a whole: what may not change its gradient, and what must."""

import pytest
import torch
from fixtures.eagle3 import random_samples, tiny_draft, tiny_strategy
from fixtures.objective import assert_exact, assert_same, assert_zero_but_touched, gradient

from specfleet.config.features import eagle3_layers
from specfleet.drafts.eagle3 import Eagle3Draft
from specfleet.trainer.strategies.eagle3 import Eagle3Strategy


def _matrices(dtype: torch.dtype = torch.float64, seed: int = 11) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(384, 32, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))  # type: ignore[return-value]


def _strategy(dtype: torch.dtype = torch.float64, **section: object) -> Eagle3Strategy:
    return tiny_strategy(tiny_draft(dtype=dtype), *_matrices(dtype), **section)


def test_step_weights() -> None:
    weights = list(_strategy().term_weights.values())
    assert weights == pytest.approx([1, 0.8, 0.64, 0.512, 0.4096, 0.32768, 0.262144])
    assert sum(weights) == pytest.approx(3.951424)


def test_default_layers() -> None:
    assert eagle3_layers(36) == (1, 17, 32)


def _counts(align: str, mask: list[int], t: int, step: int) -> bool:
    """Is row t of a rollout supervised at this step? From the definition of each mode; the teacher row must exist."""
    length = len(mask)
    if t + 1 + step >= length:
        return False
    m = [*mask, *[0] * (step + 2)]
    match align:
        case "strict":
            return all(m[t + 1 : t + 3 + step])
        case "input":
            return bool(m[t + 1 + step])
        case _:
            return bool(m[t + step]) and t + step != length - 1


@pytest.mark.parametrize("align", ["strict", "input", "compat"])
@pytest.mark.parametrize("lk", ["none", "alpha", "lambda"])
def test_loss_is_that_of_the_definition(align: str, lk: str) -> None:
    """Row by row: q against p̃, the teacher renormalised on the draft vocabulary, α against p, its true mass there.

    Rows whose teacher prefers a token that the draft cannot say are left out. λ = ½·exp(−α).
    """
    strategy = _strategy(ttt_length=3, mask_align=align, lk=lk, lk_scale=0.5, lk_decay=1.0, step_decay=0.7)
    (embedding, head), draft = _matrices(), strategy.draft
    sample = random_samples([22], dtype=torch.float64)[0]
    sample["loss_mask"][12] = 0
    mask, expected, left_out = sample["loss_mask"].tolist(), 0.0, 0
    active = [torch.arange(21 - step) for step in range(3)]
    with torch.no_grad():
        outputs = draft.rollout(sample["input_ids"].long()[None], sample["aux_states"][None], embedding, active)
        for step, output in enumerate(outputs):
            losses = []
            for t, q in enumerate(draft.logits(output).softmax(-1)):
                teacher = (sample["final_state"][t + 1 + step] @ head.T).softmax(-1)
                if not _counts(align, mask, t, step):
                    continue
                if not draft.t2d[teacher.argmax()]:
                    left_out += 1
                    continue
                p = teacher[draft.t2d]
                ce, alpha = -(p / p.sum() * q.log()).sum(), torch.minimum(p, q).sum()
                weight = {"none": 1.0, "alpha": 0.0, "lambda": 0.5 * torch.exp(-alpha)}[lk]
                losses.append(-alpha.log() if lk == "alpha" else weight * ce + (1 - weight) * (1 - alpha))
            expected += 0.7**step * float(torch.stack(losses).mean())
    assert left_out
    assert gradient(strategy, [[sample]])[0] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("align", ["strict", "input", "compat"])
def test_splitting_a_batch_does_not_change_the_gradient(align: str) -> None:
    strategy = _strategy(mask_align=align)
    samples = random_samples([21, 13, 9, 17], dtype=torch.float64)
    whole = gradient(strategy, [samples])
    assert_same(gradient(strategy, [samples[:1], samples[1:]]), whole)
    assert_same(gradient(strategy, [[sample] for sample in samples]), whole)
    assert all(grad.abs().sum() > 0 for grad in whole[1].values())


def test_reduction_is_global_not_a_mean_of_means() -> None:
    """3/1 on one side and 3/3 on the other make 6/4."""
    strategy = _strategy(ttt_length=1)
    one, three = random_samples([6], seed=1, dtype=torch.float64), random_samples([16], seed=2, dtype=torch.float64)
    parts = [gradient(strategy, [side]) for side in (one, three)]
    counts = [float(strategy.prepare(strategy.collate(side)).denominators["step_0"]) for side in (one, three)]
    assert counts[0] != counts[1]
    expected = sum(loss * count for (loss, _), count in zip(parts, counts, strict=True)) / sum(counts)
    assert gradient(strategy, [one, three])[0] == pytest.approx(expected)
    assert expected != pytest.approx(sum(loss for loss, _ in parts) / 2)


def test_padding_does_not_change_the_gradient() -> None:
    strategy = _strategy()
    short = random_samples([12], seed=1, dtype=torch.float64)
    unsupervised = random_samples([40], seed=2, dtype=torch.float64)
    unsupervised[0]["loss_mask"].zero_()
    assert_same(gradient(strategy, [short + unsupervised]), gradient(strategy, [short]))
    assert_same(gradient(strategy, [unsupervised + short]), gradient(strategy, [short]))


@pytest.mark.parametrize("chunk_rows", [1, 5, 64])
def test_chunk_size_does_not_change_the_gradient(chunk_rows: int) -> None:
    strategy = _strategy()
    samples = random_samples([21, 13], dtype=torch.float64)
    whole = gradient(strategy, [samples])
    strategy.chunk_rows = chunk_rows
    assert_same(gradient(strategy, [samples]), whole)


def test_captured_argmax_replaces_the_full_head() -> None:
    embedding, head = _matrices()
    samples = random_samples([19, 11], dtype=torch.float64)
    expected = gradient(_strategy(), [samples])
    for sample in samples:
        sample["teacher_argmax"] = (sample["final_state"] @ head.T).argmax(-1).int()
    without = tiny_strategy(tiny_draft(dtype=torch.float64), embedding, head, full=False)
    assert_same(gradient(without, [samples]), expected)


@pytest.mark.parametrize("switches", [{}, {"fc_norm": True, "norm_output": True}], ids=["eagle3", "eagle3.1"])
def test_gradient_of_the_whole_objective_is_exact(switches: dict[str, bool]) -> None:
    """Finite differences in fp64, through every rollout step, for a few entries of every parameter."""
    draft = tiny_draft(dtype=torch.float64, **switches)
    assert_exact(tiny_strategy(draft, *_matrices(), ttt_length=3), random_samples([11, 8], dtype=torch.float64))


@pytest.mark.parametrize("how", ["masked", "too short"])
def test_a_batch_without_rows_touches_every_parameter_with_zero(how: str) -> None:
    strategy = _strategy(torch.float32)
    samples = random_samples([9, 6] if how == "masked" else [2, 1], prompt=0)
    if how == "masked":
        for sample in samples:
            sample["loss_mask"].zero_()
    assert_zero_but_touched(strategy, samples)


def test_no_row_sees_what_it_is_to_guess() -> None:
    """Row t of step i may depend on tokens up to t+1+i and states up to t; changing anything later changes nothing."""
    draft, (embedding, _) = tiny_draft(dtype=torch.float64), _matrices()
    generator = torch.Generator().manual_seed(4)
    length, row = 14, 5
    ids = torch.randint(0, 384, (1, length), generator=generator)
    aux = torch.randn(1, length, 96, generator=generator, dtype=torch.float64)
    active = [torch.tensor([row])] * 4
    before = draft.rollout(ids, aux, embedding, active)
    changed_aux = aux.clone()
    changed_aux[:, row + 1 :] += 1.0
    assert all(
        torch.equal(a, b) for a, b in zip(before, draft.rollout(ids, changed_aux, embedding, active), strict=True)
    )
    for step in range(4):
        later, own = ids.clone(), ids.clone()
        later[:, row + 2 + step :] = (later[:, row + 2 + step :] + 1) % 384
        own[:, row + 1 + step] = (own[:, row + 1 + step] + 1) % 384
        assert torch.equal(draft.rollout(later, aux, embedding, active)[step], before[step])
        assert not torch.equal(draft.rollout(own, aux, embedding, active)[step], before[step])


def test_metrics_count_tokens_outside_the_draft_vocabulary_as_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = _strategy(torch.float32, ttt_length=2)
    samples = random_samples([30])
    samples[0]["teacher_argmax"] = torch.full((30,), 3, dtype=torch.int32)  # 3 = draft id 1, in the vocabulary
    samples[0]["teacher_argmax"][20:] = 4  # not in it
    samples[0]["teacher_argmax"][10] = 4
    prepared = strategy.prepare(strategy.collate(samples))
    draft = strategy.draft
    assert isinstance(draft, Eagle3Draft)
    with torch.no_grad():
        # Always draft id 1: a constant layer output and one row of the head that likes it.
        draft.lm_head.weight.zero_()
        draft.lm_head.weight[1] = 1.0
    monkeypatch.setattr(draft.midlayer, "finish", lambda feature, attended: torch.ones_like(feature))
    objective = strategy.objective(prepared)
    # Rows 2 … 27 of step 0 are judged by teacher rows 3 … 28, of which 3 … 19 but 10 are in the vocabulary.
    assert [float(x) for x in objective.metrics["acc_0"]] == [16.0, 26.0]
    assert float(prepared.denominators["step_0"]) == 16.0
    # Step 1: rows 2 … 26, teacher rows 4 … 28; 4 … 19 but 10 right. A rollout right twice is worth 3, once 2, else 1: row 8 is
    # right only at first, and row 9 only at second, where it no longer counts.
    assert [float(x) for x in objective.metrics["acc_1"]] == [15.0, 25.0]
    assert [float(x) for x in objective.metrics["tau_greedy"]] == [26.0 + 16.0 + 14.0, 26.0]


def test_identity_names_what_a_resumed_run_must_share() -> None:
    base = _strategy(torch.float32).identity()
    assert base["strategy"] == "eagle3"
    assert base["layers"] == "1,2,4"
    assert base["draft_vocab_size"] == "128"
    assert _strategy(torch.float32, ttt_length=5).identity() != base
    assert all(isinstance(value, str) for value in base.values())


def test_runs_in_bf16_close_to_fp32() -> None:
    samples = random_samples([24, 15])
    exact, _ = gradient(_strategy(torch.float32), [samples])
    low, found = gradient(_strategy(torch.bfloat16), [samples])
    assert low == pytest.approx(exact, rel=2e-2)
    assert all(grad.isfinite().all() for grad in found.values())
