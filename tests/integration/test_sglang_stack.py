"""A whole run on the embedded stack with SGLang capturing and serving, and the capture server killed in the middle."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from fixtures.stack import Specctl

from specfleet.ctl.state import read_state
from specfleet.ctl.topology import CAPTURE

pytestmark = [pytest.mark.integration, pytest.mark.sglang, pytest.mark.timeout(900)]

PROMPTS = 24


@pytest.fixture
def specctl(tmp_path: Path) -> Iterator[Specctl]:
    specctl = Specctl(tmp_path)
    done = specctl("up", "--detach", "--pool", "128M", "--engine", "sglang", "--json")
    try:
        assert done.returncode == 0, done.stderr
        yield specctl
    finally:
        specctl("down")


@pytest.fixture
def config(specctl: Specctl, tiny_target: Path) -> Path:
    with (specctl.folder / "conversations.jsonl").open("w") as file:
        for i in range(PROMPTS):
            answer = f"The answer is {i} * 3 = {i * 3}. Let me explain step by step."
            turns = [{"role": "user", "content": f"What is {i} times 3?"}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"id": f"r{i}", "source": "times", "finish": "stop", "messages": turns}) + "\n")
    path = specctl.folder / "run.yaml"
    path.write_text(
        f"""
model: {{target: {tiny_target}, dtype: float32}}
data: {{train: [conversations.jsonl], max_length: 128}}
strategy: {{draft_vocab_size: 0, ttt_length: 2}}
capture: {{engine: sglang}}
trainer: {{batch_size: 4, epochs: 2, device: cpu, dtype: float32, num_threads: 1}}
flow: {{high_samples: 8, low_samples: 4}}
deployment: {{output_dir: runs}}
"""
    )
    return path


def server_pid(specctl: Specctl) -> int:
    """The main process of the SGLang server; 0 while there is none."""
    state = read_state(specctl.state_dir)
    assert state is not None
    children = psutil.Process(state.services[CAPTURE].pid).children()
    return next((child.pid for child in children if "sglang.launch_server" in child.cmdline()), 0)


def test_a_run_survives_the_death_of_its_server(specctl: Specctl, config: Path) -> None:
    specctl.json("run", "submit", config.name, "--run-id", "served")
    specctl.wait_for(lambda: specctl.json("run", "show", "served")["trained_steps"] >= 1, timeout_s=240)
    first = server_pid(specctl)
    os.kill(first, signal.SIGKILL)
    watched = specctl("run", "watch", "served", "--json", "--interval", "0.5")
    assert watched.returncode == 0, watched.stderr + watched.stdout[-2000:]
    last = json.loads(watched.stdout.splitlines()[-1])
    assert last["state"] == "SUCCEEDED"
    assert last["trained_steps"] == last["total_steps"] == 2 * PROMPTS // 4

    ledger = specctl.json("ledger", "verify", "served")
    assert ledger["conserved"]
    assert ledger["violations"] == []
    assert [row["tasks"]["SETTLED"] for row in ledger["rows"]] == [PROMPTS, PROMPTS]
    [worker] = [member for member in specctl.json("fleet", "list")["members"] if member["kind"] == "capture"]
    assert worker["labels"]["engine_version"].startswith("sglang 0.5.14 float32 tp 1 + specfleet ")
    # What SGLang captured for, SGLang serves.
    gate = specctl.json(
        "gate", "run", "served", "--eval", "conversations.jsonl", "--no-baseline", "--max-rows", "2", "--draft-tokens", "2",
        "--serve", "sglang", "--serve-tokens", "6",
    )  # fmt: skip
    assert gate["state"] == "PASS", gate["message"]
    assert {check["name"]: check["result"] for check in gate["report"]["checks"]}["served"] == "PASS"
    [row] = gate["report"]["served"]["rows"]
    assert (row["tokens"], row["differences"]) == (6, 0)
    assert row["rounds"] == row["reference_rounds"] > 0

    second = server_pid(specctl)
    assert second != first
    specctl("down")
    assert not psutil.pid_exists(second)
