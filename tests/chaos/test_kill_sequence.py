"""kill -9 of every service, one after the other, under a run on the embedded stack: nothing lost, nothing trained twice.

The supervisor of `specctl up` starts each victim again. Each kill waits for the run to have made progress since the last one,
so every service dies while it is working.
"""

import contextlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from fixtures.stack import Specctl

from specfleet.ctl.topology import CAPTURE, COORDINATOR, NATS, TRAINER

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]

NUM_PROMPTS = 64
EPOCHS = 16
BATCH = 4
STEPS = NUM_PROMPTS * EPOCHS // BATCH
# Trained steps between two kills.
PROGRESS = 12


@pytest.fixture(scope="module")
def specctl(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Specctl]:
    specctl = Specctl(tmp_path_factory.mktemp("chaos"))
    done = specctl("up", "--detach", "--pool", "128M", "--json")
    try:
        assert done.returncode == 0, done.stderr
        yield specctl
    finally:
        specctl("down")


@pytest.fixture(scope="module")
def config(specctl: Specctl, tiny_target: Path) -> Path:
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "then", "it", "ran", "away", "from", "one", "big", "dog"]
    rng = random.Random(7)
    with (specctl.folder / "conversations.jsonl").open("w") as file:
        for _ in range(NUM_PROMPTS):
            question, answer = (" ".join(rng.choices(words, k=k)) for k in (rng.randint(3, 9), rng.randint(8, 24)))
            turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": turns}) + "\n")
    path = specctl.folder / "run.yaml"
    path.write_text(
        f"""
run_id: chaos
model: {{target: {tiny_target}, dtype: float32}}
data: {{train: [conversations.jsonl], max_length: 128}}
strategy: {{draft_vocab_size: 0, ttt_length: 3}}
trainer: {{batch_size: {BATCH}, epochs: {EPOCHS}, device: cpu, dtype: float32, num_threads: 1}}
flow: {{high_samples: 16, low_samples: 8, lease_s: 20}}
checkpoint: {{every_steps: 7}}
deployment: {{output_dir: runs}}
"""
    )
    return path


def test_a_run_survives_the_death_of_every_service(specctl: Specctl, config: Path) -> None:
    specctl.json("run", "submit", config.name)
    for victim in (TRAINER, CAPTURE, NATS, COORDINATOR):
        goal = _trained(specctl) + PROGRESS
        specctl.wait_for(lambda goal=goal: _trained(specctl) >= goal, timeout_s=180)  # type: ignore[misc]
        assert _run(specctl)["state"] == "RUNNING", "the kill must hit a working run"
        old = _service(specctl, victim)
        _kill_tree(old["pid"])
        specctl.wait_for(lambda old=old: _restarted(specctl, old), timeout_s=60)  # type: ignore[misc]

    specctl.wait_for(lambda: _run(specctl)["state"] in ("SUCCEEDED", "DEGRADED", "FAILED"), timeout_s=300)
    run = _run(specctl)
    assert run["state"] == "SUCCEEDED", run["reason"]
    assert run["trained_steps"] == STEPS
    assert run["checkpoint_step"] == STEPS
    # The trainer's death alone makes a second generation.
    assert run["generation"] >= 2

    ledger = specctl.json("ledger", "verify", "chaos")
    assert ledger["conserved"], ledger
    assert ledger["trained_twice"] == 0, ledger
    assert ledger["trained_never"] == 0, ledger
    assert not ledger["violations"], ledger
    assert [row["tasks"]["SETTLED"] for row in ledger["rows"]] == [NUM_PROMPTS] * EPOCHS

    steps = [
        json.loads(line)["step"] for line in (specctl.folder / "runs/chaos/metrics.jsonl").read_text().splitlines()
    ]
    assert steps == list(range(1, STEPS + 1)), "metrics.jsonl holds the surviving lineage, each step once"


def _run(specctl: Specctl) -> dict[str, Any]:
    done = specctl("run", "show", "chaos", "--json")
    # The coordinator may be the victim: no answer is an answer here.
    return json.loads(done.stdout) if done.returncode == 0 else {"state": "UNKNOWN", "trained_steps": -1, "reason": ""}


def _trained(specctl: Specctl) -> int:
    return int(_run(specctl)["trained_steps"])


def _kill_tree(pid: int) -> None:
    """The service and every process it started, at once: a trainer's ranks get no chance to write a last checkpoint."""
    service = psutil.Process(pid)
    for process in [service, *service.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _service(specctl: Specctl, name: str) -> dict[str, Any]:
    # The exit code says whether everything is ready, which is not the question here.
    services = json.loads(specctl("status", "--json").stdout)["services"]
    found: dict[str, Any] = next(service for service in services if service["name"] == name)
    return found


def _restarted(specctl: Specctl, old: dict[str, Any]) -> bool:
    now = _service(specctl, old["name"])
    return bool(now["restarts"] > old["restarts"] and now["pid"] != old["pid"] and now["ready"])
