"""Training logits of Domino and DSpark equal those of the reference decoder, and a learnt text is accepted whole."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import overfit
from fixtures.blocks import LAYERS, random_features
from fixtures.checkpoints import write_checkpoint
from fixtures.corrected import domino_strategy, dspark_strategy, tiny_domino, tiny_dspark, training_logits
from torch.nn import functional

from specfleet.drafts.acceptance import TextRow, offline_acceptance
from specfleet.drafts.checkpoint import load_draft_checkpoint
from specfleet.drafts.corrected import CorrectedDraft
from specfleet.drafts.decode import Decoded, decode_greedy
from specfleet.drafts.export import export_draft, load_export
from specfleet.target.hf import HFTarget
from specfleet.trainer.strategies.domino import DominoStrategy
from specfleet.trainer.strategies.dspark import DSparkStrategy

VARIANTS: dict[str, dict[str, Any]] = {
    "domino": {},
    "domino-shift": {"shift": True},
    "domino-sliding": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6},
    "dspark-vanilla": {},
    "dspark-gated": {"markov_head": "gated"},
    "dspark-rnn": {"markov_head": "rnn"},
    "dspark-sliding": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6},
}


def make_draft(variant: str, seed: int = 1) -> CorrectedDraft:
    make = tiny_domino if variant.startswith("domino") else tiny_dspark
    return make(seed=seed, **VARIANTS[variant])


def make_strategy(draft: CorrectedDraft, target: HFTarget, **section: Any) -> DominoStrategy | DSparkStrategy:
    make = domino_strategy if draft.kind == "domino" else dspark_strategy
    return make(draft, target.embedding_VH, target.head_VH, **{"num_anchors": 1000, **section})  # type: ignore[operator]


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> HFTarget:
    return HFTarget.load(tiny_target, LAYERS, dtype="float32")


def features(target: HFTarget, texts: list[list[int]], prompt: int) -> list[dict[str, torch.Tensor]]:
    samples = random_features([len(text) for text in texts], prompt=prompt)
    for sample, text, item in zip(samples, texts, target.capture(texts), strict=True):
        assert isinstance(item, dict)
        sample |= {**item, "input_ids": torch.tensor(text, dtype=torch.int32)}
    return samples


@torch.no_grad()
def decoded_logits(
    draft: CorrectedDraft, target: HFTarget, sample: dict[str, torch.Tensor], anchors: list[int]
) -> torch.Tensor:
    """[N, guesses, V]: what the decoder computes at each anchor when its guesses are forced to be the text (0 past its end)."""
    text, aux = sample["input_ids"].tolist(), sample["aux_states"]
    drafter = draft.drafter(target.embedding_VH, target.head_VH)
    done, rows = 0, []
    for anchor in anchors:
        drafter.extend(text[done + 1 : anchor + 1], aux[done:anchor])
        done = anchor
        hidden, state, logits = drafter.block(), None, []  # type: ignore[attr-defined]
        for index in range(draft.config.num_guesses):
            token = torch.tensor([text[anchor + index] if anchor + index < len(text) else 0])
            slot = hidden[None, draft.config.first_slot + index]
            z, state = draft.step(index, slot, token, state, target.embedding_VH, target.head_VH)
            logits.append(z[0])
        rows.append(torch.stack(logits))
    return torch.stack(rows)


def compare(draft: CorrectedDraft, target: HFTarget, texts: list[list[int]]) -> tuple[float, torch.Tensor]:
    """Largest |training logit − decoding logit| over every anchor and guess, and Σ cross entropy of the decoder's logits."""
    samples = features(target, texts, prompt=1)
    tensors, trained = training_logits(make_strategy(draft, target), samples)
    guesses, first = draft.config.num_guesses, draft.config.first_slot
    gap, losses = 0.0, torch.zeros(())
    for index, sample in enumerate(samples):
        mine = tensors["sample"] == index
        decoded = decoded_logits(draft, target, sample, tensors["anchors"][mine].tolist())
        gap = max(gap, float((trained[mine][:, :guesses] - decoded).abs().max()))
        labels, valid = (tensors[name][mine][:, first : first + guesses] for name in ("labels", "valid"))
        losses += functional.cross_entropy(decoded[valid], labels[valid], reduction="sum")
    return gap, losses


def random_texts(*lengths: int, seed: int = 5) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 384, (n,), generator=generator).tolist() for n in lengths]


@pytest.mark.parametrize("variant", VARIANTS)
def test_training_logits_equal_decoding_logits(target: HFTarget, variant: str) -> None:
    draft, texts = make_draft(variant), random_texts(19, 12)
    gap, decoded_ce = compare(draft, target, texts)
    assert gap < 1e-4
    if variant != "domino-shift":  # whose last slot is trained and not served
        strategy = make_strategy(draft, target)
        metrics = strategy.objective(strategy.prepare(strategy.collate(features(target, texts, prompt=1)))).metrics
        torch.testing.assert_close(metrics["ce"][0], decoded_ce, rtol=1e-5, atol=0)


@pytest.mark.parametrize("variant", ["domino", "domino-shift", "dspark-vanilla"])
def test_the_test_can_fail(target: HFTarget, variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training that corrects each guess with the very token it is to guess is noticed."""
    monkeypatch.setattr(
        "fixtures.corrected.previous_tokens", lambda tensors, config: tensors["labels"][:, config.first_slot :]
    )
    assert compare(make_draft(variant), target, random_texts(14))[0] > 1e-3


@torch.no_grad()
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("k", [2, 9])
def test_chain_hits_are_what_the_drafter_would_be_accepted_for(target: HFTarget, variant: str, k: int) -> None:
    """On texts in which runs of right guesses of every length occur: each block continues the draft's own chain for a while."""
    draft = make_draft(variant, seed=3)
    texts = [_agreeable_text(draft, target, length, seed) for seed, length in enumerate((24, 15))]
    ids, aux = torch.zeros(2, 24, dtype=torch.int64), torch.full((2, 24, len(LAYERS) * 32), 1e3)
    for index, sample in enumerate(features(target, texts, prompt=1)):
        ids[index, : len(texts[index])] = sample["input_ids"]
        aux[index, : len(texts[index])] = sample["aux_states"]
    hits = draft.chain_hits(ids, aux, target.embedding_VH, k, target.head_VH)
    runs = set()
    for index, text in enumerate(texts):
        drafter = draft.drafter(target.embedding_VH, target.head_VH)
        for row in range(len(text) - 2):
            drafter.extend([text[row + 1]], aux[index, row : row + 1])
            proposed = drafter.propose(k)
            assert len(proposed) == min(k, 4)
            ahead = text[row + 2 : row + 2 + k]
            run = next(
                (i for i, (a, b) in enumerate(zip(proposed, ahead, strict=False)) if a != b),
                min(len(ahead), len(proposed)),
            )
            assert hits[index, row, : len(ahead)].tolist() == [i < run for i in range(len(ahead))]
            runs.add(run)
    assert runs >= {0, 1, 2}


def _agreeable_text(draft: CorrectedDraft, target: HFTarget, length: int, seed: int) -> list[int]:
    """Random tokens between runs of the draft's own guesses."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(0, 384, (3,), generator=generator).tolist()
    run = 0
    while len(text) < length:
        item = target.capture([text])[0]
        assert isinstance(item, dict)
        drafter = draft.drafter(target.embedding_VH, target.head_VH)
        drafter.extend(text[1:], item["aux_states"][:-1])
        run = run % 3 + 1
        text += [*drafter.propose(run), *torch.randint(0, 384, (1,), generator=generator).tolist()]
    return text[:length]


Learnt = Callable[[str], tuple[DominoStrategy | DSparkStrategy, list[int], Decoded]]


@pytest.fixture(scope="module")
def learnt(target: HFTarget) -> Learnt:
    """Variant → a strategy whose draft has learnt one answer of five full rounds, the text, and its decoding."""

    @cache
    def learn(variant: str) -> tuple[DominoStrategy | DSparkStrategy, list[int], Decoded]:
        draft = make_draft(variant, seed=6)
        new_tokens = 1 + 5 * (draft.config.num_guesses + 1)
        text, sample = overfit.greedy_sample(target, new_tokens)
        strategy = make_strategy(draft, target, **({"total_steps": 10} if draft.kind == "domino" else {}))
        for step, times in ((2, 50), (10, 80)):  # Domino: both losses, then the corrected one alone
            strategy.begin_step(step)
            overfit.learn(strategy, sample, times)
        return strategy, text, overfit.decode(target, strategy, new_tokens, draft.config.num_guesses)

    return learn


@pytest.mark.parametrize("variant", ["domino", "domino-shift", "dspark-gated", "dspark-rnn", "dspark-vanilla"])
def test_one_learnt_text_is_accepted_whole_and_survives_export(
    target: HFTarget, learnt: Learnt, variant: str, tmp_path: Path
) -> None:
    strategy, text, decoded = learnt(variant)
    draft, k, prompt = strategy.draft, strategy.draft.config.num_guesses, overfit.PROMPT
    assert prompt + decoded.ids == text
    assert decoded.acceptance_length == k + 1
    row = TextRow(text, len(prompt))
    assert offline_acceptance([row], target, draft, k)[0].length == decoded.acceptance_length
    reloaded = load_draft_checkpoint(write_checkpoint(tmp_path / "checkpoint", draft))[0]
    for layout in ("sglang", "vllm") if variant == "dspark-vanilla" else ("sglang",):
        export_draft(reloaded, layout, tmp_path / layout, dtype=torch.float32)
        loaded = load_export(tmp_path / layout)
        assert loaded.config == draft.config
        drafter = loaded.drafter(target.embedding_VH, target.head_VH)
        again = decode_greedy(target, drafter, prompt, len(decoded.ids), k)
        assert (again.ids, again.accepted) == (decoded.ids, decoded.accepted)


def test_a_draft_trained_for_the_next_token_fails_when_served_for_its_own(target: HFTarget, learnt: Learnt) -> None:
    """shift_label is part of the draft: the same weights under the other convention lose the learnt text."""
    strategy, _, right = learnt("domino-shift")
    draft = strategy.draft
    other = type(draft).from_config({**draft.config.to_dict(), "sample_from_anchor": False})
    other.load_state_dict(draft.state_dict())
    drafter = other.drafter(target.embedding_VH, target.head_VH)
    wrong = decode_greedy(target, drafter, overfit.PROMPT, len(right.ids), 4)
    assert wrong.ids == right.ids
    assert wrong.acceptance_length < right.acceptance_length


@torch.no_grad()
def test_low_confidence_ends_a_chain(target: HFTarget) -> None:
    draft = tiny_dspark(seed=4)
    sample = features(target, random_texts(12), prompt=1)[0]
    text, aux = sample["input_ids"].tolist(), sample["aux_states"]
    lengths = set()
    for anchor in range(2, 11):
        whole, cautious = (draft.drafter(target.embedding_VH, target.head_VH, x) for x in (0.0, 0.5))
        for drafter in (whole, cautious):
            drafter.extend(text[1 : anchor + 1], aux[:anchor])
        chain = whole.propose(4)
        previous = torch.tensor([text[anchor], *chain[:-1]])
        chances = torch.sigmoid(draft.confidence(whole.block(), previous)).tolist()
        kept = next((i for i, chance in enumerate(chances) if chance < 0.5), 4)
        assert cautious.propose(4) == chain[:kept]
        assert cautious.propose(2) == chain[: min(kept, 2)]
        lengths.add(kept)
    assert {0} < lengths
    # A drafter that never dares leaves plain decoding, token for token.
    plain = decode_greedy(target, None, overfit.PROMPT, 8, 0)
    timid = decode_greedy(target, draft.drafter(target.embedding_VH, target.head_VH, 1.1), overfit.PROMPT, 8, 4)
    assert (timid.ids, timid.acceptance_length) == (plain.ids, 1.0)
