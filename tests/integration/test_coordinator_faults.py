"""kill -9 of the coordinator, a bus that loses everything, a store that loses everything: nothing is lost or trained twice."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from fixtures.coordinator_life import Agent, Fleet, Store, Worker, config_yaml, write_prompt_set
from fixtures.net import NatsServer, free_port

pytestmark = pytest.mark.integration


class Service:
    """`specfleet-coordinator` as its users start it: one port and one ledger over all its lives."""

    def __init__(self, folder: Path, nats: str) -> None:
        self.port = free_port()
        self._argv = [
            sys.executable, "-m", "specfleet.coordinator", "--listen", f"127.0.0.1:{self.port}",
            "--metrics", "127.0.0.1:0", "--nats", nats, "--ledger", f"sqlite:///{folder / 'ledger.db'}",
            "--data-dir", str(folder),
        ]  # fmt: skip
        self._log = (folder.parent / "coordinator.log").open("ab")
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(self._argv, stdout=subprocess.DEVNULL, stderr=self._log)

    def end(self, how: signal.Signals = signal.SIGKILL) -> int:
        process, self._process = self._process, None
        if process is None:
            return 0
        process.send_signal(how)
        return process.wait(timeout=20)


@pytest.fixture
def service(tmp_path: Path, nats_server: NatsServer) -> Iterator[Service]:
    found = Service(tmp_path / "coordinator", nats_server.url)
    found.start()
    yield found
    found.end()
    found._log.close()


async def prove(fleet: Fleet, run_id: str, prompts: int, epochs: int = 1) -> None:
    assert Counter(fleet.finals[run_id]) == Counter((e, i) for e in range(epochs) for i in range(prompts))
    verdict = await fleet.verify(run_id)
    assert verdict.conserved
    assert (verdict.trained_twice, verdict.trained_never, list(verdict.violations)) == (0, 0, [])


async def test_kill_9_of_the_coordinator(service: Service, nats_server: NatsServer, tmp_path: Path) -> None:
    """Three times in mid-run; once longer than a lease lasts. The same generation trains on: nobody else notices."""
    prompts = write_prompt_set(tmp_path / "prompts", 90)
    fleet = Fleet(f"127.0.0.1:{service.port}", nats_server.url, Store())
    worker, agent = Worker(fleet), Agent(fleet)
    worker.delay_s, agent.step_s = 0.01, 0.03
    worker.start()
    agent.start()
    await fleet.submit("killed", config_yaml(tmp_path / "runs", prompts, flow={"lease_s": 1.0}), prompts)
    for step, away_s in ((3, 0.0), (8, 0.3), (14, 1.5)):
        await fleet.wait_for("killed", lambda s, step=step: s.trained_steps >= step)
        await asyncio.to_thread(service.end)
        await asyncio.sleep(away_s)
        service.start()
        before = (await fleet.get("killed")).trained_steps
        await fleet.wait_for("killed", lambda s, before=before: s.trained_steps > before)
    done = await fleet.finish("killed")
    assert (done.state, done.generation, done.tasks) == ("SUCCEEDED", 1, {"SETTLED": 90})
    await prove(fleet, "killed", 90)
    assert fleet.store.objects == {}
    await agent.kill()
    await worker.kill()
    assert service.end(signal.SIGTERM) == 0


async def test_the_bus_loses_everything(service: Service, nats_server: NatsServer, tmp_path: Path) -> None:
    """Prompts, samples, plans and releases vanish in mid-run; the ledger has all of them published again."""
    prompts = write_prompt_set(tmp_path / "prompts", 60)
    fleet = Fleet(f"127.0.0.1:{service.port}", nats_server.url, Store())
    worker, agent = Worker(fleet), Agent(fleet)
    agent.step_s = worker.delay_s = 0.02
    worker.start()
    agent.start()
    await fleet.submit("wiped", config_yaml(tmp_path / "runs", prompts, flow={"lease_s": 1.0}), prompts)
    await fleet.wait_for("wiped", lambda s: s.trained_steps >= 4)
    await asyncio.to_thread(nats_server.kill)
    nats_server.wipe()
    await asyncio.to_thread(nats_server.start)
    done = await fleet.finish("wiped")
    assert (done.state, done.generation) == ("SUCCEEDED", 1)
    await prove(fleet, "wiped", 60)
    await agent.kill()
    await worker.kill()


async def test_the_store_loses_everything_and_everyone_is_killed(
    service: Service, nats_server: NatsServer, tmp_path: Path
) -> None:
    prompts = write_prompt_set(tmp_path / "prompts", 60)
    fleet = Fleet(f"127.0.0.1:{service.port}", nats_server.url, Store())
    worker, agent = Worker(fleet), Agent(fleet, every_steps=4)
    agent.step_s = 0.02
    worker.start()
    agent.start()
    yaml = config_yaml(tmp_path / "runs", prompts, trainer={"epochs": 2}, flow={"lease_s": 1.0})
    await fleet.submit("dark", yaml, prompts)
    await fleet.wait_for("dark", lambda s: s.trained_steps >= 6)
    fleet.store.objects.clear()
    await fleet.wait_for("dark", lambda s: s.trained_steps >= 13)
    await agent.kill()
    await worker.kill()
    await asyncio.to_thread(service.end)
    await asyncio.to_thread(nats_server.kill)
    fleet.store.objects.clear()
    await asyncio.to_thread(nats_server.start)
    service.start()
    worker.start()
    agent.start()
    done = await fleet.finish("dark")
    assert (done.state, done.tasks) == ("SUCCEEDED", {"SETTLED": 120})
    assert agent.history[0] == (1, 0)
    assert agent.history[-1] == (2, 12)
    await prove(fleet, "dark", 60, epochs=2)
    await agent.kill()
    await worker.kill()


def test_a_port_in_use_is_said_clearly(service: Service, nats_server: NatsServer, tmp_path: Path) -> None:
    wait_for_port(service.port)
    argv = [a if a != str(tmp_path / "coordinator") else str(tmp_path / "second") for a in service._argv]
    argv[argv.index("--ledger") + 1] = ""
    result = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)
    assert result.returncode == 3
    last = json.loads(result.stderr.strip().splitlines()[-1])
    assert last["code"] == "SF-HOST-PORT-IN-USE"
    assert f"127.0.0.1:{service.port}" in last["event"]


def wait_for_port(port: int) -> None:
    import grpc

    from specfleet.rpc.client import connect_sync

    with connect_sync(f"127.0.0.1:{port}") as channel:
        grpc.channel_ready_future(channel).result(timeout=20)


def test_starts_without_torch_and_answers_help_quickly() -> None:
    code = (
        "import sys, specfleet.coordinator.app\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "[]"
    code = "import sys, specfleet.coordinator.__main__\nprint(any(n in sys.modules for n in ('sqlalchemy', 'grpc', 'numpy')))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "False"
    environment = {**os.environ, "COLUMNS": "120"}
    shown = subprocess.run(
        [sys.executable, "-m", "specfleet.coordinator", "--help"],
        capture_output=True, text=True, timeout=60, check=True, env=environment,
    )  # fmt: skip
    flags = set(re.findall(r"--[a-z-]+", shown.stdout))
    assert {"--listen", "--metrics", "--nats", "--ledger", "--data-dir", "--insecure"} <= flags
