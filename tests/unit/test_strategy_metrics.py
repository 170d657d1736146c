"""What every strategy reports: ratios of sums that stay in their range and do not depend on how a step was split."""

import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fixtures.blocks import frozen_matrices, random_features, tiny_dflash
from fixtures.corrected import domino_strategy, dspark_strategy, tiny_domino, tiny_dspark
from fixtures.eagle3 import tiny_draft, tiny_strategy
from fixtures.peagle import tiny_peagle, tiny_peagle_strategy

from specfleet.config.models import DFlashSection
from specfleet.trainer.strategies.base import Strategy
from specfleet.trainer.strategies.dflash import DFlashStrategy

F64 = torch.float64
GUESSES = 4
EMBEDDING, HEAD = frozen_matrices(F64)
DOCS = (Path(__file__).parents[2] / "docs" / "strategies.md").read_text(encoding="utf-8")
DOCUMENTED = {
    name
    for line in re.findall(r"^\| `.*", DOCS.partition("## Reading the metrics")[2].partition("\n## ")[0], re.MULTILINE)
    for name in re.findall(r"`(\w+)`", line.split("|")[1])
}
EVERY_STRATEGY = {"acc_0", "acc_1", "tau_greedy", "tau_prob", "skipped_samples"}


def _dflash() -> Strategy:
    section = DFlashSection(name="dflash", block_size=GUESSES + 1, num_anchors=5)
    return DFlashStrategy(section, tiny_dflash(dtype=F64), EMBEDDING, HEAD)


def _domino() -> Strategy:
    """In the middle of its curriculum."""
    strategy = domino_strategy(tiny_domino(dtype=F64), EMBEDDING, HEAD, total_steps=10, num_anchors=5)
    strategy.begin_step(3)
    return strategy


STRATEGIES: dict[str, tuple[Callable[[], Strategy], set[str]]] = {
    "eagle3": (lambda: tiny_strategy(tiny_draft(dtype=F64), EMBEDDING, HEAD, ttt_length=GUESSES), {"alpha_0", "loss_0"}),
    "peagle": (lambda: tiny_peagle_strategy(tiny_peagle(dtype=F64), HEAD), {"alpha_0", "loss_0"}),
    "dflash": (_dflash, {"alpha", "ce", "acc"}),
    "domino": (_domino, {"alpha", "alpha_base", "acc", "acc_base", "tau_prob_base", "tau_greedy_base", "base_weight"}),
    "dspark": (
        lambda: dspark_strategy(tiny_dspark(dtype=F64), EMBEDDING, HEAD, num_anchors=5),
        {"alpha", "confidence_error", "confidence_bias", "confidence_chain_bias"},
    ),
}  # fmt: skip


def _sums(strategy: Strategy, micro_batches: list[list[dict[str, torch.Tensor]]]) -> dict[str, list[float]]:
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for samples in micro_batches:
        for name, pair in strategy.objective(strategy.prepare(strategy.collate(samples))).metrics.items():
            for part in (0, 1):
                sums[name][part] += float(pair[part])
    return sums


@pytest.mark.parametrize("name", STRATEGIES)
def test_metrics_add_up_and_stay_in_range(name: str) -> None:
    make, special = STRATEGIES[name]
    strategy = make()
    samples = random_features([21, 2, 13, 17], dtype=F64)  # the second has no answer
    whole = _sums(strategy, [samples])
    assert EVERY_STRATEGY | special <= whole.keys()
    split = _sums(strategy, [[sample] for sample in samples])
    assert split.keys() == whole.keys()
    for metric, (numerator, denominator) in whole.items():
        assert re.sub(r"_\d+$", "_i", metric).replace("_base", "") in DOCUMENTED, metric
        # base_weight is a constant of the step, given once per micro-batch.
        times = len(samples) if metric == "base_weight" else 1
        assert split[metric] == pytest.approx([times * numerator, times * denominator], rel=1e-5), metric
        if denominator == 0:
            continue
        value, kind = numerator / denominator, metric.rstrip("0123456789").rstrip("_").removesuffix("_base")
        low, high = {
            "acc": (0, 1), "alpha": (0, 1), "skipped_samples": (0.25, 0.25), "base_weight": (0, 1),
            "tau_greedy": (1, GUESSES + 1), "tau_prob": (1, GUESSES + 1), "teacher_agreement": (0, 1),
            "confidence_error": (0, 1), "confidence_bias": (-1, 1), "confidence_chain_bias": (-1, 1), "l": (0, 2),
        }.get(kind, (0, float("inf")))  # fmt: skip
        assert low <= value <= high, metric


def test_alpha_of_a_text_is_the_probability_of_its_tokens() -> None:
    """DFlash knows no teacher: the text counts as certain."""
    strategy = _dflash()
    prepared = strategy.prepare(strategy.collate(random_features([14], dtype=F64)))
    tensors, draft = prepared.tensors, strategy.draft
    metrics = strategy.objective(prepared).metrics
    context = draft.context(tensors["context_states"], tensors["context_positions"])
    with torch.no_grad():
        hidden = draft.blocks(context, tensors["anchors"], tensors["anchor_ids"], tensors["starts"], EMBEDDING)
    chance = (hidden @ HEAD.T).softmax(-1).gather(-1, tensors["labels"][..., None])[..., 0]
    chance = torch.where(tensors["valid"], chance, 0.0)[:, 1:]
    assert float(metrics["alpha"][0]) == pytest.approx(float(chance.sum()))
    assert float(metrics["tau_prob"][0]) == pytest.approx(float(len(chance) + chance.cumprod(1).sum()))
    assert [float(metrics[name][1]) for name in ("alpha", "tau_prob")] == [int(tensors["valid"].sum()), len(chance)]
