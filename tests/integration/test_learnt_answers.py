"""Every option of every strategy learns one greedy answer by heart and is then accepted whole.

From the draft as trained, from its checkpoint, and from every export of that, token for token.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import overfit
from fixtures.blocks import tiny_dflash
from fixtures.checkpoints import write_checkpoint
from fixtures.corrected import domino_strategy, dspark_strategy, tiny_domino, tiny_dspark
from fixtures.eagle3 import tiny_draft, tiny_strategy
from fixtures.peagle import tiny_peagle, tiny_peagle_strategy

from specfleet.config.strategies import DFlashSection
from specfleet.drafts.acceptance import TextRow, offline_acceptance
from specfleet.drafts.base import Draft
from specfleet.drafts.checkpoint import load_draft_checkpoint
from specfleet.drafts.decode import Decoded, decode_greedy
from specfleet.drafts.export import LAYOUTS, export_draft, load_export
from specfleet.target.hf import HFTarget
from specfleet.trainer.strategies.base import Strategy
from specfleet.trainer.strategies.dflash import DFlashStrategy

pytestmark = pytest.mark.integration

K, ROUNDS = 3, 4
V31 = {"fc_norm": True, "norm_output": True}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}

# Strategy, what the draft is built with, what training is told, engines that refuse the export.
Case = tuple[str, dict[str, Any], dict[str, Any], set[str]]
CASES: dict[str, Case] = {
    "eagle3": ("eagle3", {}, {}, set()),
    "eagle3-fc-norm": ("eagle3", {"fc_norm": True}, {}, set()),
    "eagle3-norm-output": ("eagle3", {"norm_output": True}, {}, set()),
    "eagle3-legacy": ("eagle3", {"norm_output": True, "legacy_v030": True}, {}, {"sglang", "vllm"}),
    "eagle3-two-layers": ("eagle3", {"layer_ids": [1, 3]}, {}, set()),
    "eagle3-five-layers": ("eagle3", {"layer_ids": [0, 1, 2, 3, 4]}, {}, set()),
    "eagle3-reduced": ("eagle3", {"draft_vocab_size": 96}, {}, set()),
    "eagle3-target-head": (
        "eagle3",
        {"own_head": False, **V31},
        {"head": "target", "draft_vocab_size": 0, "lk": "alpha"},
        set(),
    ),
    "eagle3-experts": ("eagle3", {"experts": 3}, {}, {"sglang", "vllm"}),
    "eagle3-lk-lambda": ("eagle3", {}, {"lk": "lambda"}, set()),
    "eagle3-lk-lambda-batch": ("eagle3", {}, {"lk": "lambda", "lk_lambda": "batch"}, set()),
    "eagle3-input": ("eagle3", {}, {"mask_align": "input"}, set()),
    "eagle3-sampled": ("eagle3", {}, {"ttt_schedule": "sampled"}, set()),
    "peagle": ("peagle", {}, {}, set()),
    "peagle-one-layer": ("peagle", {"num_layers": 1}, {}, set()),
    "peagle-norm-before-residual": ("peagle", {"norm_before_residual": True}, {}, set()),
    "peagle-reduced": ("peagle", {"draft_vocab_size": 96}, {}, set()),
    "dflash-one-layer": ("dflash", {"num_layers": 1}, {}, set()),
    "dflash-five-captured": ("dflash", {"layer_ids": [0, 1, 2, 3, 4]}, {"loss_decay": None}, set()),
    "dflash-mha": ("dflash", {"num_key_value_heads": 4}, {}, set()),
    "domino-sliding": ("domino", SLIDING, {}, set()),
    "dspark-sliding": ("dspark", SLIDING, {}, {"vllm"}),
    "dspark-no-confidence": ("dspark", {"confidence_head": False}, {}, set()),
    "dspark-confidence-without-markov": ("dspark", {"confidence_with_markov": False}, {}, set()),
}
TARGETS = Callable[[tuple[int, ...]], HFTarget]


@pytest.fixture(scope="module")
def targets(tiny_target: Path) -> TARGETS:
    return cache(lambda layers: HFTarget.load(tiny_target, layers, dtype="float32"))


def _draft(kind: str, changes: dict[str, Any], text: list[int]) -> Draft:
    if kind in ("eagle3", "peagle"):
        make = tiny_draft if kind == "eagle3" else tiny_peagle
        draft = make(seed=1, **{"draft_vocab_size": 384, **({"num_depths": K} if kind == "peagle" else {}), **changes})
        size = draft.config.draft_vocab_size
        if size < 384:
            known = sorted({*text, *sorted(set(range(384)) - set(text))[: size - len(set(text))]})
            chosen = torch.tensor(known)
            draft.set_vocabulary(chosen - torch.arange(size), torch.isin(torch.arange(384), chosen))
        return draft
    blocks = {"dflash": tiny_dflash, "domino": tiny_domino, "dspark": tiny_dspark}
    return blocks[kind](seed=6, **{"block_size": K if kind == "dspark" else K + 1, **changes})


def _strategy(draft: Any, target: HFTarget, section: dict[str, Any]) -> Strategy:
    embedding, head = target.embedding_VH, target.head_VH
    match draft.kind:
        case "eagle3":
            # A head eight times larger has the same argmax and is far surer of it, so that nothing hangs on near-ties. It is
            # too sure for −log α, which starts flat where the overlap is nothing.
            teacher = head if section.get("lk") == "alpha" else 8 * head
            return tiny_strategy(draft, embedding, teacher, **{"ttt_length": K, "step_decay": 1.0, **section})
        case "peagle":
            draft.embed_tokens.weight.data.copy_(embedding)
            return tiny_peagle_strategy(draft, 8 * head, **{"keep_ratio": 1.0, "keep_ratio_min": 1.0, **section})
        case "dflash":
            block_size = draft.config.block_size
            return DFlashStrategy(
                DFlashSection(name="dflash", block_size=block_size, **section), draft, embedding, head
            )
        case "domino":
            return domino_strategy(draft, embedding, head, **section)
        case _:
            return dspark_strategy(draft, embedding, head, **section)


@pytest.mark.parametrize("case", CASES)
def test_an_answer_learnt_by_heart_is_accepted_whole(case: str, targets: TARGETS, tmp_path: Path) -> None:
    kind, changes, section, refused = CASES[case]
    new_tokens = 1 + ROUNDS * (K + 1)
    layers = tuple(changes.get("layer_ids", (1, 2, 3 if kind in ("dflash", "domino", "dspark") else 4)))
    target = targets(layers)
    text, sample = overfit.greedy_sample(target, new_tokens)
    draft = _draft(kind, changes, text)
    strategy = _strategy(draft, target, section)

    def decode(model: Draft) -> Decoded:
        drafter = model.drafter(target.embedding_VH, target.head_VH)
        return decode_greedy(target, drafter, overfit.PROMPT, new_tokens, K)

    assert decode(draft).acceptance_length < 2.0
    torch.manual_seed(0)
    overfit.learn(strategy, sample, steps=120, lr=1e-2)
    decoded = decode(draft)
    assert overfit.PROMPT + decoded.ids == text
    assert decoded.accepted == [K] * ROUNDS
    row = TextRow(text, len(overfit.PROMPT))
    assert offline_acceptance([row], target, draft, K)[0].length == K + 1
    saved = load_draft_checkpoint(write_checkpoint(tmp_path / "checkpoint", draft))[0]
    assert decode(saved) == decoded
    for layout in (layout.engine for layout in LAYOUTS if layout.kind == kind and layout.engine not in refused):
        export_draft(saved, layout, tmp_path / layout, dtype=torch.float32)
        assert decode(load_export(tmp_path / layout)) == decoded, layout
