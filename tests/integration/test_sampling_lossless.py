"""Sampling with each family's own draft, on a transformers target: the texts come out with exactly the target's probabilities.

Target and drafts have three tokens, so that the decoder can be run along every path chance can take (fixtures/outcomes.py).
"""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fixtures.outcomes import distribution
from transformers import LlamaConfig, LlamaForCausalLM

from specfleet.drafts.base import Draft, Drafter
from specfleet.drafts.decode import decode
from specfleet.drafts.dspark import DSparkDraft
from specfleet.drafts.eagle_base import EagleDraft
from specfleet.drafts.registry import build_draft
from specfleet.drafts.verification import Chance, Proposal, Rejection, Rule, Sampling, TargetOnly
from specfleet.target.hf import HFTarget

pytestmark = pytest.mark.integration

VOCAB, PROMPT, NEW, K, EOS = 3, [2, 0, 1], 3, 2, (1,)
LAYERS = (0, 1)
TEMPERED = Sampling(0.8)

_SIZES = {
    "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
    "vocab_size": VOCAB, "layer_ids": list(LAYERS), "max_position_embeddings": 64,
}  # fmt: skip
_EAGLE = {**_SIZES, "target_hidden_size": 16, "draft_vocab_size": 2}
_BLOCK = {**_SIZES, "num_layers": 1, "block_size": 3, "mask_token_id": 2, "num_target_layers": 3}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle3-reduced": ("eagle3", _EAGLE),
    "eagle3.1": ("eagle3", {**_EAGLE, "draft_vocab_size": VOCAB, "fc_norm": True, "norm_output": True}),
    "peagle-reduced": ("peagle", {**_EAGLE, "num_layers": 2, "num_depths": 2, "mask_token_id": 2}),
    "dflash": ("dflash", _BLOCK),
    "domino": ("domino", {**_BLOCK, "gru_hidden_size": 4, "embedding_size": 4}),
    "domino-shift": ("domino", {**_BLOCK, "gru_hidden_size": 4, "embedding_size": 4, "sample_from_anchor": True}),
    "dspark-rnn": ("dspark", {**_BLOCK, "block_size": 2, "sample_from_anchor": True, "markov_head": "rnn", "markov_rank": 4}),
}  # fmt: skip


@pytest.fixture(scope="module")
def target() -> HFTarget:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=VOCAB, hidden_size=16, intermediate_size=16, num_hidden_layers=3, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=64, initializer_range=0.2,
        )  # fmt: skip
        model = LlamaForCausalLM(config).eval().requires_grad_(False)
    return HFTarget("three tokens", model, LAYERS, torch.float32, "none", ())


@pytest.fixture(scope="module")
def expected(target: HFTarget) -> dict[tuple[int, ...], float]:
    """The target's own distribution over texts of up to three tokens, from plain forward passes."""
    found: dict[tuple[int, ...], float] = {}
    for text in itertools.product(range(VOCAB), repeat=NEW):
        logits, _, _ = target.forward(torch.tensor([[*PROMPT, *text]]))
        probs = TEMPERED.distribution(logits[len(PROMPT) - 1 :])
        end = next((i + 1 for i, token in enumerate(text) if token in EOS), NEW)
        found[text[:end]] = float(torch.stack([probs[i, text[i]] for i in range(end)]).prod())
    assert sum(found.values()) == pytest.approx(1.0)
    return found


def make_draft(family: str) -> Draft:
    kind, config = FAMILIES[family]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        draft = build_draft(kind, config).eval().requires_grad_(False)
        for parameter in draft.parameters():
            # Far from its initial values, so that every head says something of its own.
            parameter += 0.2 * torch.randn_like(parameter)
    if isinstance(draft, EagleDraft) and draft.config.draft_vocab_size < VOCAB:
        draft.set_vocabulary(torch.tensor([0, 1]), torch.tensor([True, False, True]))
    return draft


def texts_of(
    target: HFTarget, drafter: Callable[[], Drafter], rule: Callable[[Chance], Rule]
) -> dict[tuple[int, ...], float]:
    return distribution(lambda chance: tuple(decode(target, drafter(), PROMPT, NEW, K, EOS, rule(chance)).ids))


@pytest.mark.parametrize("family", FAMILIES)
def test_rejection_sampling_is_lossless(target: HFTarget, expected: dict[tuple[int, ...], float], family: str) -> None:
    draft, uncertain = make_draft(family), []

    class Watched(Rejection):
        def propose(self, drafter: Drafter, k: int) -> Proposal:
            proposal = super().propose(drafter, k)
            assert proposal.probs_KV is not None
            uncertain.append(float(proposal.probs_KV.max(-1).values.min()))
            return proposal

    def drafter() -> Drafter:
        return draft.drafter(target.embedding_VH, target.head_VH)

    found = texts_of(target, drafter, lambda chance: Watched(TEMPERED, chance))
    assert found == pytest.approx(expected, abs=1e-5)
    # A draft that is certain of everything would prove nothing.
    assert min(uncertain) < 0.8


@pytest.mark.parametrize("rule", [Rejection, TargetOnly])
def test_truncating_where_confidence_is_low_stays_lossless(
    target: HFTarget, expected: dict[tuple[int, ...], float], rule: type[Rejection]
) -> None:
    draft, lengths = make_draft("dspark-rnn"), set()
    assert isinstance(draft, DSparkDraft)

    class Watched(rule):  # type: ignore[misc, valid-type]
        def propose(self, drafter: Drafter, k: int) -> Proposal:
            proposal: Proposal = super().propose(drafter, k)
            lengths.add((k, len(proposal.ids)))
            return proposal

    found = texts_of(
        target,
        lambda: draft.drafter(target.embedding_VH, target.head_VH, min_confidence=0.5),
        lambda chance: Watched(TEMPERED, chance),
    )
    assert found == pytest.approx(expected, abs=1e-5)
    assert {length for k, length in lengths if k == K} >= {0, K}
