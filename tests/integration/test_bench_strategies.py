"""The comparison of strategies in miniature: every case on a tiny target, and the pool that runs cases."""

import argparse
import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from fixtures.tiny import make_tiny_target

from benchmarks.strategies.__main__ import baselines, finished, plan_of
from benchmarks.strategies.case import run_case
from benchmarks.strategies.cases import CASES, configure
from benchmarks.strategies.plan import Plan, result_file
from benchmarks.strategies.pool import run_all
from benchmarks.strategies.table import render

STEPS, BATCH = 3, 4


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> argparse.Namespace:
    work = tmp_path_factory.mktemp("bench")
    target = make_tiny_target(work / "target", num_hidden_layers=10)
    rows = [
        {
            "id": f"r{index}",
            "source": ("first", "second")[index % 2],
            "split": "train" if index < 8 else "dev",
            "finish": ("stop", "length", "length")[index % 3],
            "messages": [
                {"role": "user", "content": f"What is {index} times 3?"},
                {"role": "assistant", "content": f"The answer is {3 * index}. " * (1 + index % 3)},
            ],
        }
        for index in range(12)
    ]
    data = work / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return argparse.Namespace(
        work=work,
        data=str(data),
        target=target,
        samples=0,
        response_tokens=0,
        rows_per_source=1,
        batch_size=BATCH,
        tokens=0,
    )


@pytest.fixture(scope="module")
def plan(arguments: argparse.Namespace) -> Plan:
    made, facts, rows = plan_of(arguments, torch.device("cpu"), arguments.target)
    assert (facts["train_rows"], len(rows)) == (8, 2)
    (arguments.work / "cases").mkdir()
    return Plan(**{**vars(made), "steps": STEPS})


@pytest.mark.parametrize("name", CASES)
def test_every_case_trains_on_the_same_tokens(name: str, plan: Plan, arguments: argparse.Namespace) -> None:
    told = run_case(name, plan)
    assert told["steps"] == STEPS
    tokens = 1.5 * plan_of(arguments, torch.device("cpu"), arguments.target)[1]["train_tokens_per_epoch"]
    assert told["tokens"] == pytest.approx(tokens, rel=0.3)
    assert set(told["tau"]) == set(told["untrained"]) == {"first", "second"}
    assert all(lengths["all"] >= 1.0 for lengths in told["tau"].values())


def test_a_result_counts_under_its_own_plan_only(plan: Plan, arguments: argparse.Namespace) -> None:
    path = result_file(arguments.work, "eagle3")
    path.write_text(json.dumps({"steps": STEPS, "identity": plan.identity("eagle3")}))
    assert finished(arguments, plan, "eagle3") == {"steps": STEPS}
    assert finished(arguments, plan, "dflash") is None
    assert finished(arguments, plan, "eagle3:trainer.lr=2e-3") is None
    assert finished(arguments, Plan(**{**vars(plan), "steps": 1 + STEPS}), "eagle3") is None
    path.unlink()


def test_a_case_can_be_varied(arguments: argparse.Namespace) -> None:
    plain, varied = (configure(name, arguments.target, BATCH) for name in ("eagle3", "eagle3:trainer.lr=2e-3"))
    assert (plain.trainer.lr, varied.trainer.lr) == (1e-3, 2e-3)
    assert varied.model_copy(update={"trainer": plain.trainer}) == plain


def test_features_are_captured_once(plan: Plan, arguments: argparse.Namespace) -> None:
    again, facts, _ = plan_of(arguments, torch.device("cpu"), arguments.target)
    assert facts["capture_tokens_per_s"] is None
    assert (again.train, again.held_out) == (plan.train, plan.held_out)


def test_the_table_shows_what_failed(plan: Plan, arguments: argparse.Namespace) -> None:
    rows = plan_of(arguments, torch.device("cpu"), arguments.target)[2]
    told = {
        "guesses": 5, "tokens_per_s": 1234, "peak_gib": None, "untrained": {"first": {"all": 1.0}, "second": {"all": 1.0}},
        "tau": {"first": {"all": 1.5, "stop": 1.25}, "second": {"all": 1.0}},
    }  # fmt: skip
    text = render(
        {
            "baselines": baselines(rows, ["eagle3"], arguments.target, BATCH),
            "strategies": {"eagle3": told, "dflash": {"error": "exit code 1: out of memory"}},
        }
    )
    assert "1.50 (1.25)" in text
    assert text.endswith("dflash: exit code 1: out of memory")


async def test_one_failure_leaves_the_others_alone(tmp_path: Path) -> None:
    codes: dict[str, int] = {}
    commands = {
        name: [sys.executable, "-c", f"print('hello'); raise SystemExit({code})"] for name, code in CODES.items()
    }
    assert await run_all(commands, 2, tmp_path, os.environ, codes.__setitem__)
    assert codes == CODES
    assert {path.read_text() for path in tmp_path.glob("*.log")} == {"hello\n"}


CODES = {"good": 0, "bad": 3, "fine": 0}


async def test_a_signal_ends_what_runs_and_starts_no_more(tmp_path: Path) -> None:
    ended: list[str] = []
    wait = "import os, signal; os.kill(os.getppid(), signal.SIGTERM); signal.pause()"
    commands = {"runs": [sys.executable, "-c", wait], "waits": [sys.executable, "-c", ""]}
    task = asyncio.ensure_future(run_all(commands, 1, tmp_path, os.environ, lambda name, code: ended.append(name)))
    try:
        assert not await task
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().remove_signal_handler(number)
    assert ended == []
    assert not (tmp_path / "waits.log").exists()
