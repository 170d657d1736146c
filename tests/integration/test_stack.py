"""`specctl up --detach` and everything behind it, as a user runs it: real services, one whole run, a tiny target from a hub."""

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from fixtures.hub import stand_in_hub
from fixtures.stack import Specctl

from specfleet.ctl.state import is_alive, is_running, read_state
from specfleet.ctl.topology import CAPTURE, COORDINATOR, GATE, MASTER, NATS, OWNER, TRAINER

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

TARGET = "org/tiny-llama"
EVERYTHING = {NATS, MASTER, OWNER, COORDINATOR, CAPTURE, TRAINER, GATE}


@pytest.fixture(scope="module")
def commit(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of TARGET, at a hub that specctl and every service download from."""
    with stand_in_hub() as hub, pytest.MonkeyPatch.context() as environment:
        environment.setenv("HF_ENDPOINT", hub.url)
        environment.setenv("HF_HOME", str(tmp_path_factory.mktemp("hf")))
        yield hub.publish(TARGET, tiny_target)


@pytest.fixture(scope="module")
def specctl(commit: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Specctl]:
    specctl = Specctl(tmp_path_factory.mktemp("stack"))
    done = specctl("up", "--detach", "--pool", "128M", "--json")
    try:
        assert done.returncode == 0, done.stderr
        document = json.loads(done.stdout)
        assert document["state"] == "ready"
        assert {service["name"] for service in document["services"]} == EVERYTHING
        yield specctl
    finally:
        specctl("down")


@pytest.fixture(scope="module")
def conversations(specctl: Specctl) -> Path:
    path = specctl.folder / "conversations.jsonl"
    with path.open("w") as file:
        for i in range(24):
            answer = f"The answer is {i} * 3 = {i * 3}. Let me explain step by step."
            turns = [{"role": "user", "content": f"What is {i} times 3?"}, {"role": "assistant", "content": answer}]
            split = "dev" if i % 6 == 5 else "train"
            row = {"id": f"r{i}", "source": "times", "split": split, "finish": "stop", "messages": turns}
            file.write(json.dumps(row) + "\n")
    return path


@pytest.fixture(scope="module")
def config(specctl: Specctl, conversations: Path) -> Path:
    path = specctl.folder / "run.yaml"
    path.write_text(
        f"""
model: {{target: {TARGET}, dtype: float32}}
data: {{train: [{conversations.name}], filter: {{split: [train]}}, max_length: 128}}
strategy: {{draft_vocab_size: 0, ttt_length: 2}}
trainer: {{batch_size: 4, epochs: 2, device: cpu, dtype: float32, num_threads: 1}}
flow: {{high_samples: 16, low_samples: 8}}
gate: {{eval: [{conversations.name}], eval_filter: {{split: [dev]}}, lossless_rows: 1}}
deployment: {{output_dir: runs}}
"""
    )
    return path


def test_status_shows_every_service(specctl: Specctl) -> None:
    document = specctl.json("status")
    assert document["running"]
    assert document["runs"] == []
    for service in document["services"]:
        assert service["ready"], service
        assert service["alive"], service
        assert service["restarts"] == 0, service
        assert all(port > 0 for port in service["ports"].values())
    members = specctl.json("fleet", "list")["members"]
    assert {member["kind"] for member in members} == {"capture", "trainer"}


def test_a_second_stack_on_the_same_folder_is_refused(specctl: Specctl) -> None:
    for detach in ((), ("--detach",)):
        done = specctl("up", *detach)
        assert done.returncode == 3
        assert "[SF-STACK-RUNNING]" in done.stderr
        assert "specctl down" in done.stderr
        assert len(done.stderr.splitlines()) == 1
    assert specctl.json("status")["state"] == "ready"


def test_bad_data_is_refused_before_the_run_exists(specctl: Specctl, config: Path) -> None:
    (specctl.folder / "empty.jsonl").write_text("")
    (specctl.folder / "not.jsonl").write_text("this is not JSON\n")
    for name in ("missing.jsonl", "empty.jsonl", "not.jsonl"):
        done = specctl("run", "submit", config.name, "-s", f"data.train=[{name}]")
        assert done.returncode == 2, f"{name}: {done.stderr}"
        assert name in done.stderr
        assert len(done.stderr.splitlines()) == 1
    assert specctl.json("run", "list")["runs"] == []


def test_a_run_from_submission_to_gate(specctl: Specctl, config: Path, commit: str) -> None:
    run = specctl.json("run", "submit", config.name, "--run-id", "tiny")
    assert (run["run_id"], run["target"]) == ("tiny", f"{TARGET}@{commit}")
    assert run["prompt_set"]
    watched = specctl("run", "watch", "tiny", "--json", "--interval", "0.2")
    assert watched.returncode == 0, watched.stderr + watched.stdout[-2000:]
    last = json.loads(watched.stdout.splitlines()[-1])
    assert last["state"] == "SUCCEEDED"
    assert last["trained_steps"] == last["total_steps"] == 10
    assert last["captured_tokens"] == last["trained_tokens"] > 0
    assert set(last["five_numbers"]) == {
        "capture_rate", "training_rate", "actual_rate", "wait_share", "in_flight_bytes",
    }  # fmt: skip

    ledger = specctl.json("ledger", "verify", "tiny")
    assert ledger["conserved"]
    assert ledger["violations"] == []
    assert [row["tasks"]["SETTLED"] for row in ledger["rows"]] == [20, 20]
    assert specctl.json("checkpoint", "list", "tiny")["checkpoints"][-1]["final"]
    sample = specctl.json("sample", "explain", "tiny/e0000-p000000003")
    assert sample["state"] == "SETTLED"
    assert sample["history"]
    assert specctl.json("run", "logs", "tiny")["lines"]

    again = specctl("run", "submit", config.name, "--run-id", "tiny", "-s", "trainer.epochs=3")
    assert again.returncode == 2
    assert "tiny" in again.stderr

    export = specctl.json("export", "tiny")
    assert Path(export["output_dir"]).name == "sglang"
    assert (Path(export["output_dir"]) / "config.json").exists()
    gate = specctl.json("gate", "run", "tiny", "--no-baseline", "--temperature", "0.8", "--top-p", "0.95")
    assert gate["state"] == "PASS"
    assert gate["report"]["sampling"] == {"rule": "rejection", "temperature": 0.8, "top_k": 0, "top_p": 0.95}
    assert gate["report"]["acceptance_length"]["times"]["after"] >= 1.0
    assert specctl.json("gate", "show", gate["gate_id"])["report"] == gate["report"]


def test_a_run_for_an_engine_that_nobody_has_says_so(specctl: Specctl, config: Path) -> None:
    specctl.json("run", "submit", config.name, "--run-id", "other-engine", "-s", "capture.engine=sglang")
    wanted = "no capture worker with engine sglang (capture.engine) yet, only hf"
    specctl.wait_for(lambda: wanted in specctl.json("run", "show", "other-engine")["reason"])
    specctl.json("run", "cancel", "other-engine")


@pytest.mark.parametrize("victim", [COORDINATOR, CAPTURE, NATS])
def test_a_killed_service_is_back_on_its_port(specctl: Specctl, victim: str) -> None:
    state = read_state(specctl.state_dir)
    assert state is not None
    before = state.services[victim]
    os.kill(before.pid, signal.SIGKILL)

    def back() -> bool:
        state = read_state(specctl.state_dir)
        assert state is not None
        now = state.services[victim]
        return now.restarts == before.restarts + 1 and now.state == "ready"

    specctl.wait_for(back)
    after = read_state(specctl.state_dir)
    assert after is not None
    assert after.services[victim].ports == before.ports
    assert after.services[victim].last_exit == -signal.SIGKILL
    assert "tiny" in {run["run_id"] for run in specctl.json("run", "list")["runs"]}


def test_a_killed_supervisor_takes_its_services_along_and_the_next_one_finds_the_runs(specctl: Specctl) -> None:
    before = read_state(specctl.state_dir)
    assert before is not None
    os.kill(before.supervisor_pid, signal.SIGKILL)
    specctl.wait_for(lambda: not is_running(specctl.state_dir))
    assert specctl("status").returncode == 3
    done = specctl("up", "--detach", "--pool", "128M", "--json")
    assert done.returncode == 0, done.stderr
    for service in before.services.values():
        assert not is_alive(service.pid, service.start_ticks)
    after = read_state(specctl.state_dir)
    assert after is not None
    assert after.ports == before.ports
    assert {run["run_id"] for run in specctl.json("run", "list")["runs"]} == {"tiny", "other-engine"}


def test_down_stops_everything(specctl: Specctl) -> None:
    before = read_state(specctl.state_dir)
    assert before is not None
    assert specctl.json("down")["stopped"]
    for service in before.services.values():
        assert not is_alive(service.pid, service.start_ticks)
    assert not is_running(specctl.state_dir)
    state = read_state(specctl.state_dir)
    assert state is not None
    assert state.state == "stopped"
    assert specctl.json("down") == {"stopped": False, "state_dir": str(specctl.state_dir.relative_to(specctl.folder))}
    done = specctl("status")
    assert done.returncode == 3
    assert len(done.stderr.splitlines()) == 1


def test_a_service_that_cannot_start_is_shown_with_its_log(tmp_path: Path) -> None:
    specctl = Specctl(tmp_path)
    done = specctl("up", "--detach", "--store", "directory", SPECFLEET_DEVICE="abacus")
    assert done.returncode == 3, done.stdout
    # Three services read the variable; which of them ends first is chance.
    assert re.search(r"\[SF-STACK-START\] (capture|trainer|gate) ended with 2", done.stderr)
    assert "abacus" in done.stderr
    state = read_state(specctl.state_dir)
    assert state is not None
    assert state.state == "failed"
    assert not is_running(specctl.state_dir)
    assert not any(is_alive(s.pid, s.start_ticks) for s in state.services.values())
