"""What every strategy reports: ratios of sums that stay in their range and do not depend on how a step was split."""

import re
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from fixtures.blocks import frozen_matrices, random_features
from fixtures.every_strategy import EVERY_STRATEGY, GUESSES

from specfleet.trainer.strategies.base import Strategy

F64 = torch.float64
DOCS = (Path(__file__).parents[2] / "docs" / "strategies.md").read_text(encoding="utf-8")
DOCUMENTED = {
    name
    for line in re.findall(r"^\| `.*", DOCS.partition("## Reading the metrics")[2].partition("\n## ")[0], re.MULTILINE)
    for name in re.findall(r"`(\w+)`", line.split("|")[1])
}
COMMON = {"acc_0", "acc_1", "tau_greedy", "tau_prob", "skipped_samples"}
SPECIAL = {
    "eagle3": {"alpha_0", "loss_0"},
    "peagle": {"alpha_0", "loss_0"},
    "dflash": {"alpha", "ce", "acc"},
    "domino": {"alpha", "alpha_base", "acc", "acc_base", "tau_prob_base", "tau_greedy_base", "base_weight"},
    "dspark": {"alpha", "confidence_error", "confidence_bias", "confidence_chain_bias"},
}


def _sums(strategy: Strategy, micro_batches: list[list[dict[str, torch.Tensor]]]) -> dict[str, list[float]]:
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for samples in micro_batches:
        for name, pair in strategy.objective(strategy.prepare(strategy.collate(samples))).metrics.items():
            for part in (0, 1):
                sums[name][part] += float(pair[part])
    return sums


@pytest.mark.parametrize("name", EVERY_STRATEGY)
def test_metrics_add_up_and_stay_in_range(name: str) -> None:
    strategy = EVERY_STRATEGY[name](F64)
    samples = random_features([21, 2, 13, 17], dtype=F64)  # the second has no answer
    whole = _sums(strategy, [samples])
    assert COMMON | SPECIAL[name] <= whole.keys()
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
    strategy = EVERY_STRATEGY["dflash"](F64)
    embedding, head = frozen_matrices(F64)
    prepared = strategy.prepare(strategy.collate(random_features([14], dtype=F64)))
    tensors, draft = prepared.tensors, strategy.draft
    metrics = strategy.objective(prepared).metrics
    context = draft.context(tensors["context_states"], tensors["context_positions"])
    with torch.no_grad():
        hidden = draft.blocks(context, tensors["anchors"], tensors["anchor_ids"], tensors["starts"], embedding)
    chance = (hidden @ head.T).softmax(-1).gather(-1, tensors["labels"][..., None])[..., 0]
    chance = torch.where(tensors["valid"], chance, 0.0)[:, 1:]
    assert float(metrics["alpha"][0]) == pytest.approx(float(chance.sum()))
    assert float(metrics["tau_prob"][0]) == pytest.approx(float(len(chance) + chance.cumprod(1).sum()))
    assert [float(metrics[name][1]) for name in ("alpha", "tau_prob")] == [int(tensors["valid"].sum()), len(chance)]
