"""The same gradient however a step is split over micro-batches and over real processes with gloo."""

import multiprocessing
import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from fixtures.blocks import random_features
from fixtures.every_strategy import EVERY_STRATEGY
from fixtures.net import free_port
from fixtures.objective import Samples
from fixtures.tiny_strategy import HIDDEN, TinyStrategy

from specfleet.trainer.optim import MasterAdamW
from specfleet.trainer.parallel import Ranks
from specfleet.trainer.reduction import Sums, accumulate
from specfleet.trainer.strategies.base import Strategy

pytestmark = pytest.mark.integration

# Sample lengths per rank and micro-batch: even, uneven, and a rank with nothing to do.
SPLITS: list[list[list[list[int]]]] = [
    [[[2, 3]], [[4, 5]]],
    [[[2], [3, 4]], [[5]]],
    [[[2, 3, 4, 5]], []],
]


def sample(length: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(length)
    mask = torch.ones(length, dtype=torch.uint8)
    mask[0] = 0
    return {
        "input_ids": torch.arange(length),
        "loss_mask": mask,
        "final_state": torch.randn(length, HIDDEN, generator=generator),
    }


def one_step(micro_batches: list[list[int]], ranks: Ranks) -> dict[str, Any]:
    return step_of(TinyStrategy(), [[sample(length) for length in lengths] for lengths in micro_batches], ranks)


def step_of(strategy: Strategy, micro_batches: Sequence[Samples], ranks: Ranks) -> dict[str, Any]:
    """Gradient (as the first moment over 1 − β₁, before clipping matters), norm, and totals of one step."""
    optimizer = MasterAdamW(strategy.draft.named_parameters(), max_grad_norm=1e9)
    batches = [strategy.collate(samples) for samples in micro_batches]
    share = accumulate(strategy, batches, optimizer, ranks)
    norm = float(optimizer.step(1e-3, ranks))
    total = Sums.total(ranks.gather(share.read().fact()))
    gradient = torch.cat([t.flatten() for name, t in optimizer.state().items() if name.startswith("exp_avg.")]) * 10
    return {"gradient": gradient.tolist(), "norm": norm, "pairs": total.pairs, "loss_tokens": total.num_loss_tokens}


def work(rank: int, port: int, results: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    ranks = Ranks(rank, 2)
    tiny = [one_step(split[rank], ranks) for split in SPLITS]
    every = {name: step_of(make(torch.float32), shares()[rank], ranks) for name, make in EVERY_STRATEGY.items()}
    results.put((rank, (tiny, every)))
    ranks.close()


def shares() -> list[list[Samples]]:
    """Real features, unevenly split over two ranks; one sample has no answer."""
    a, b, c, d = random_features([21, 2, 13, 17])
    return [[[a]], [[b], [c, d]]]


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["gradient"] == pytest.approx(expected["gradient"], rel=1e-5, abs=1e-6)
    assert found["norm"] == pytest.approx(expected["norm"], rel=1e-5)
    assert found["loss_tokens"] == expected["loss_tokens"]
    for name, pair in expected["pairs"].items():
        assert tuple(found["pairs"][name]) == pytest.approx(pair, rel=1e-5), name


@pytest.mark.parametrize("micro_batches", [[[2, 3, 4, 5]], [[5, 4], [3, 2]], [[2], [3], [4, 5]]])
def test_micro_batches_do_not_change_the_gradient(micro_batches: list[list[int]]) -> None:
    assert_same(one_step(micro_batches, Ranks()), one_step([[2, 3, 4, 5]], Ranks()))


def test_loss_is_the_ratio_of_sums() -> None:
    strategy = TinyStrategy()
    batch = strategy.collate([sample(length) for length in (2, 3, 4, 5)])
    objective, prepared = strategy.objective(strategy.prepare(batch)), strategy.prepare(batch)
    expected = sum(
        weight * float(objective.numerators[name].detach() / prepared.denominators[name])
        for name, weight in strategy.term_weights.items()
    )
    assert one_step([[2, 3], [4, 5]], Ranks())["pairs"]["loss"][0] == pytest.approx(expected, rel=1e-6)


def test_two_processes_have_the_gradient_of_one() -> None:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    port = free_port()
    processes = [context.Process(target=work, args=(rank, port, results)) for rank in range(2)]
    for process in processes:
        process.start()
    found = dict(results.get(timeout=90) for _ in processes)
    for process in processes:
        process.join(timeout=30)
        assert process.exitcode == 0
    expected = one_step([[2, 3, 4, 5]], Ranks())
    for case in range(len(SPLITS)):
        assert_same(found[0][0][case], expected)
        assert found[0][0][case]["gradient"] == found[1][0][case]["gradient"]
    for name, make in EVERY_STRATEGY.items():
        whole = step_of(make(torch.float32), [[*shares()[0][0], *shares()[1][0], *shares()[1][1]]], Ranks())
        (_, every), (_, other) = found[0], found[1]
        largest = max(map(abs, whole["gradient"]))
        assert every[name]["gradient"] == pytest.approx(whole["gradient"], rel=1e-3, abs=1e-5 * largest), name
        assert every[name]["gradient"] == other[name]["gradient"]
        assert every[name]["norm"] == pytest.approx(whole["norm"], rel=1e-5)
