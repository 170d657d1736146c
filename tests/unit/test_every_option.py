"""Every option of every strategy's section reaches training, and a resumed run must agree with it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.feature_sets import random_features
from fixtures.objective import gradient
from fixtures.tiny_runs import tiny_prompt_set, tiny_run

from specfleet.config.strategies import STRATEGY_SECTIONS

BASE: dict[str, dict[str, Any]] = {
    "eagle3": {"draft_vocab_size": 96, "ttt_length": 3},
    "peagle": {"draft_vocab_size": 96, "num_layers": 2, "num_depths": 3, "mask_token_id": 383},
    "dflash": {"num_layers": 2, "block_size": 4, "num_anchors": 9, "mask_token_id": 383},
    "domino": {
        "num_layers": 2, "block_size": 4, "num_anchors": 9, "mask_token_id": 383, "gru_hidden_size": 16, "embedding_size": 8
    },
    "dspark": {"num_layers": 2, "block_size": 4, "num_anchors": 9, "mask_token_id": 383, "markov_rank": 8},
}  # fmt: skip

# Per option: what it is changed to, and what must be set for it to matter.
Changes = dict[str, tuple[dict[str, Any], dict[str, Any]]]
SHARED: Changes = {"layers": ({"layers": [1, 2, 3, 4]}, {}), "intermediate_size": ({"intermediate_size": 40}, {})}
LAMBDA = {"lk": "lambda"}
BLOCK: Changes = SHARED | {
    "num_layers": ({"num_layers": 3}, {"layers": [1, 3]}),
    "block_size": ({"block_size": 5}, {}),
    "num_anchors": ({"num_anchors": 3}, {}),
    "loss_decay": ({"loss_decay": None}, {}),
    "mask_token_id": ({"mask_token_id": 382}, {}),
    "contiguous": ({"contiguous": False}, {}),
    "sliding_window": ({"sliding_window": 6}, {}),
}
OPTIONS: dict[str, Changes] = {
    "eagle3": SHARED | {
        "draft_vocab_size": ({"draft_vocab_size": 64}, {}),
        "head": ({"head": "target"}, {"draft_vocab_size": 0}),
        "ttt_length": ({"ttt_length": 4}, {}),
        "ttt_schedule": ({"ttt_schedule": "curriculum"}, {}),
        "step_decay": ({"step_decay": 0.5}, {}),
        "mask_align": ({"mask_align": "input"}, {}),
        "fc_norm": ({"fc_norm": True}, {}),
        "norm_output": ({"norm_output": True}, {}),
        "legacy_v030": ({"legacy_v030": True}, {"norm_output": True}),
        "lk": ({"lk": "alpha"}, {}),
        "lk_scale": ({"lk_scale": 0.5}, LAMBDA),
        "lk_decay": ({"lk_decay": 1.0}, LAMBDA),
        "lk_lambda": ({"lk_lambda": "batch"}, LAMBDA),
        "experts": ({"experts": 3}, {}),
        "experts_per_token": ({"experts_per_token": 1}, {"experts": 3}),
    },
    "peagle": SHARED | {
        "draft_vocab_size": ({"draft_vocab_size": 64}, {}),
        "num_layers": ({"num_layers": 3}, {}),
        "num_depths": ({"num_depths": 2}, {}),
        "keep_ratio": ({"keep_ratio": 0.5}, {}),
        "keep_ratio_min": ({"keep_ratio_min": 0.5}, {"keep_ratio": 0.5}),
        "mask_token_id": ({"mask_token_id": 382}, {}),
        "norm_before_residual": ({"norm_before_residual": True}, {}),
        "mask_align": ({"mask_align": "compat"}, {}),
    },
    "dflash": BLOCK | {
        "loss": ({"loss": "dpace"}, {}),
        "dpace_alpha": ({"dpace_alpha": 0.9}, {"loss": "dpace"}),
        "dpace_norm": ({"dpace_norm": "sequence"}, {"loss": "dpace"}),
    },
    "domino": BLOCK | {
        "gru_hidden_size": ({"gru_hidden_size": 12}, {}),
        "embedding_size": ({"embedding_size": 6}, {}),
        "shift_label": ({"shift_label": True}, {}),
        "base_weight": ({"base_weight": 0.5}, {}),
        "base_decay_ratio": ({"base_decay_ratio": 0.25}, {}),
    },
    "dspark": BLOCK | {
        "markov_head": ({"markov_head": "rnn"}, {}),
        "markov_rank": ({"markov_rank": 6}, {}),
        "confidence_head": ({"confidence_head": False}, {}),
        "confidence_with_markov": ({"confidence_with_markov": False}, {}),
        "ce_weight": ({"ce_weight": 0.5}, {}),
        "l1_weight": ({"l1_weight": 0.5}, {}),
        "confidence_weight": ({"confidence_weight": 0.5}, {}),
    },
}  # fmt: skip
ELSEWHERE = {"name", "init_from", "chunk_blocks"}
"""Tests of warm starts, and those that chunks change nothing."""


Trained = Callable[[dict[str, Any]], tuple[float, dict[str, str]]]


@pytest.fixture(scope="module")
def trained(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Section → loss of the third of twenty steps on random features, and identity."""
    prompt_set = tiny_prompt_set(tmp_path_factory.mktemp("prompts"), tiny_target)
    known: dict[str, tuple[float, dict[str, str]]] = {}

    def train(section: dict[str, Any]) -> tuple[float, dict[str, str]]:
        contract, strategy = tiny_run(tiny_target, prompt_set, section)
        samples = []
        for prompt in prompt_set.read(range(len(prompt_set))):
            sample = random_features(contract, prompt) | {"visit": torch.tensor([0, prompt.index])}
            sample["loss_mask"][11] = 0  # a gap inside the answer
            samples.append(sample)
        strategy.begin_step(3)
        return gradient(strategy, [samples])[0], strategy.identity()

    def cached(section: dict[str, Any]) -> tuple[float, dict[str, str]]:
        key = repr(section)
        if key not in known:
            known[key] = train(section)
        return known[key]

    return cached


@pytest.mark.parametrize("name", STRATEGY_SECTIONS)
def test_every_option_is_tried(name: str) -> None:
    assert OPTIONS[name].keys() == STRATEGY_SECTIONS[name].model_fields.keys() - ELSEWHERE


@pytest.mark.parametrize(
    ("name", "option"), [(name, option) for name, options in OPTIONS.items() for option in options]
)
def test_an_option_changes_training_and_identity(name: str, option: str, trained: Trained) -> None:
    change, context = OPTIONS[name][option]
    base = {"name": name, **BASE[name], **context}
    (loss, identity), (other_loss, other_identity) = trained(base), trained(base | change)
    assert loss != pytest.approx(other_loss, rel=1e-6), "training is the same"
    assert identity != other_identity, "a run could be resumed with the other value"
