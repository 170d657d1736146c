"""The embedded supervisor with real children: nats-server and small Python programs."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from specfleet.contracts.errors import HostError
from specfleet.ctl import probes
from specfleet.ctl.ports import Ports
from specfleet.ctl.state import (
    ServiceState,
    StackLock,
    StackState,
    is_alive,
    is_running,
    read_state,
    start_ticks,
    write_state,
)
from specfleet.ctl.supervisor import Supervisor, end_leftovers, tiers
from specfleet.ctl.topology import Probe, Service

# A TCP server that appends its name to a file when it is told to stop; argv: port, name, file.
SERVER = """
import signal, socket, sys
def stop(*_):
    with open(sys.argv[3], "a") as file: file.write(sys.argv[2] + "\\n")
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
while True: server.accept()[0].close()
"""


@pytest.fixture
def ports():
    held = Ports(["a", "b"], wanted={}, remembered={})
    yield held
    held.close()


def nats(port: int, folder: Path) -> Service:
    argv = ("nats-server", "-a", "127.0.0.1", "-p", str(port), "-js", "-sd", str(folder))
    return Service("a", argv, ("a",), (Probe("nats", "a"),))


def server(name: str, port: int, log: Path, *, after: tuple[str, ...] = ()) -> Service:
    argv = ("python3", "-c", SERVER, str(port), name, str(log))
    return Service(name, argv, (name,), (Probe("tcp", name),), after=after, grace_s=5)


async def wait_for(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110  (the condition is a file that another process writes)
            await asyncio.sleep(0.01)


def services_of(state_dir: Path) -> dict[str, ServiceState]:
    state = read_state(state_dir)
    return state.services if state else {}


async def test_a_killed_service_comes_back_at_once_on_its_port(tmp_path: Path, ports: Ports) -> None:
    supervisor = Supervisor([nats(ports.numbers["a"], tmp_path / "js")], StackState(ports=ports.numbers), tmp_path)
    running = asyncio.create_task(supervisor.run())
    await wait_for(lambda: (s := read_state(tmp_path)) is not None and s.state == "ready")
    first = services_of(tmp_path)["a"]
    killed_at = time.monotonic()
    os.kill(first.pid, signal.SIGKILL)
    await wait_for(lambda: services_of(tmp_path)["a"].restarts == 1 and services_of(tmp_path)["a"].state == "ready")
    took_s = time.monotonic() - killed_at
    second = services_of(tmp_path)["a"]
    assert second.pid != first.pid
    assert second.last_exit == -signal.SIGKILL
    assert await probes.check(Probe("nats", "a"), ports.numbers["a"])
    assert took_s < 2.0, f"the first restart must be fast, it took {took_s:.2f} s"
    supervisor.stop()
    await running
    assert not is_alive(second.pid, second.start_ticks)
    assert read_state(tmp_path).state == "stopped"


async def test_starts_in_order_and_stops_in_reverse(tmp_path: Path, ports: Ports) -> None:
    stopped, started = tmp_path / "stopped", list[str]()
    services = [server("b", ports.numbers["b"], stopped, after=("a",)), server("a", ports.numbers["a"], stopped)]
    supervisor = Supervisor(services, StackState(ports=ports.numbers), tmp_path, report=started.append)
    running = asyncio.create_task(supervisor.run(supervisor.stop))
    await running
    assert [line.split(":")[0] for line in started if ": ready" in line] == ["a", "b"]
    assert stopped.read_text().split() == ["b", "a"]


async def test_a_service_that_cannot_start_stops_the_others_and_shows_its_log(tmp_path: Path, ports: Ports) -> None:
    broken = Service(
        "b", ("python3", "-c", "raise SystemExit('no such model')"), ("b",), (Probe("tcp", "b"),), after=("a",)
    )
    supervisor = Supervisor(
        [nats(ports.numbers["a"], tmp_path / "js"), broken], StackState(ports=ports.numbers), tmp_path
    )
    with pytest.raises(HostError, match=r"b ended with 1(?s:.*)no such model") as caught:
        await supervisor.run()
    assert caught.value.code == "SF-STACK-START"
    state = read_state(tmp_path)
    assert state.state == "failed"
    assert state.services["b"].state == "failed"
    assert state.services["a"].state == "stopped"
    assert not await probes.check(Probe("tcp", "a"), ports.numbers["a"])


async def test_a_missing_program_is_named(tmp_path: Path, ports: Ports) -> None:
    service = Service("a", ("no-such-program-here",), ("a",), (Probe("tcp", "a"),))
    with pytest.raises(HostError, match=r"no-such-program-here(?s:.*)specfleet\[local\]"):
        await Supervisor([service], StackState(ports=ports.numbers), tmp_path).run()


async def test_a_second_stop_kills_a_service_that_ignores_the_first(tmp_path: Path, ports: Ports) -> None:
    stubborn = SERVER.replace("signal.signal(signal.SIGTERM, stop)", "signal.signal(signal.SIGTERM, signal.SIG_IGN)")
    argv = ("python3", "-c", stubborn, str(ports.numbers["a"]))
    service = Service("a", argv, ("a",), (Probe("tcp", "a"),), grace_s=60)
    supervisor = Supervisor([service], StackState(ports=ports.numbers), tmp_path)
    running = asyncio.create_task(supervisor.run(supervisor.stop))
    await wait_for(lambda: (s := read_state(tmp_path)) is not None and s.state == "stopping")
    supervisor.stop()
    async with asyncio.timeout(5):
        await running
    assert read_state(tmp_path).services["a"].last_exit == -signal.SIGKILL


async def test_children_die_with_a_killed_supervisor(tmp_path: Path, ports: Ports) -> None:
    ports.close()
    program = textwrap.dedent(f"""
        import asyncio, pathlib
        from specfleet.ctl.state import StackState
        from specfleet.ctl.supervisor import Supervisor
        from specfleet.ctl.topology import Probe, Service
        port = {ports.numbers["a"]}
        argv = ("nats-server", "-a", "127.0.0.1", "-p", str(port), "-js", "-sd", {str(tmp_path / "js")!r})
        service = Service("a", argv, ("a",), (Probe("nats", "a"),))
        asyncio.run(Supervisor([service], StackState(ports={{"a": port}}), pathlib.Path({str(tmp_path)!r})).run())
    """)
    process = subprocess.Popen([sys.executable, "-c", program])  # noqa: ASYNC220
    try:
        await wait_for(lambda: (s := read_state(tmp_path)) is not None and s.state == "ready")
        child = services_of(tmp_path)["a"]
        process.kill()
        process.wait()
        await wait_for(lambda: not is_alive(child.pid, child.start_ticks))
    finally:
        process.kill()
        process.wait()


def test_tiers_refuse_services_that_wait_for_one_another() -> None:
    a = Service("a", ("x",), (), (), after=("b",))
    b = Service("b", ("x",), (), (), after=("a",))
    with pytest.raises(ValueError, match="a, b"):
        tiers([a, b])


def test_leftovers_are_ended_only_while_pid_and_start_time_agree() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    try:
        ticks = start_ticks(process.pid)
        reused = StackState(services={"a": ServiceState(pid=process.pid, start_ticks=ticks - 1)})
        assert end_leftovers(reused) == []
        assert process.poll() is None
        ours = StackState(services={"a": ServiceState(pid=process.pid, start_ticks=ticks)})
        assert end_leftovers(ours) == ["a"]
        assert process.wait(5) == -signal.SIGTERM
    finally:
        process.kill()
        process.wait()


def test_the_lock_says_whether_a_stack_runs(tmp_path: Path) -> None:
    assert not is_running(tmp_path)
    lock = StackLock(tmp_path)
    assert lock.acquire()
    assert is_running(tmp_path)
    assert not StackLock(tmp_path).acquire()
    lock.release()
    assert not is_running(tmp_path)


def test_a_state_file_survives_a_round_trip_and_a_foreign_one_is_refused(tmp_path: Path) -> None:
    state = StackState(
        state="ready", ports={"nats": 4}, services={"nats": ServiceState(pid=7, restarts=2, last_exit=-9)}
    )
    write_state(tmp_path, state)
    assert read_state(tmp_path) == state
    assert [path.name for path in tmp_path.iterdir()] == ["stack.json"]
    for text in ('{"format": 99, "services": {}}', "not json", '{"format": 1, "services": {}, "colour": 1}', "[]"):
        (tmp_path / "stack.json").write_text(text)
        with pytest.raises(HostError) as caught:
            read_state(tmp_path)
        assert caught.value.code == "SF-STACK-STATE"


def test_ports_are_remembered_and_a_wanted_port_in_use_is_refused() -> None:
    first = Ports(["a", "b"], wanted={}, remembered={})
    numbers = dict(first.numbers)
    first.close()
    again = Ports(["a", "b"], wanted={}, remembered=numbers)
    assert again.numbers == numbers
    again.close()

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        moved = Ports(["a"], wanted={}, remembered={"a": port})
        assert moved.numbers["a"] != port
        moved.close()
        with pytest.raises(HostError, match=rf"port {port} for a cannot be bound") as caught:
            Ports(["a"], wanted={"a": port}, remembered={})
    assert caught.value.code == "SF-HOST-PORT"


def test_a_reserved_port_is_given_to_nobody_but_its_service(ports: Ports) -> None:
    port = ports.numbers["a"]
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))
    # A service (SO_REUSEADDR, which create_server sets) may listen on it, and again after it is gone.
    for _ in range(2):
        with socket.create_server(("127.0.0.1", port)) as server:
            socket.create_connection(server.getsockname()).close()
