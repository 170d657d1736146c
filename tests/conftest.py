"""Fixtures for every test. Helpers live in tests/fixtures and are imported as `fixtures.NAME`."""

import os
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from fixtures import net

if TYPE_CHECKING:
    from fixtures.coordinator_life import Fleet

    from specfleet.coordinator.app import Coordinator

# Triton looks at this when it is imported: on a host without a GPU its kernels run in its interpreter.
if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random six-layer Llama with a ChatML tokenizer (tests/fixtures/tiny.py). Tests must not change it."""
    from fixtures.tiny import make_tiny_target

    return make_tiny_target(tmp_path_factory.mktemp("tiny-target"))


@pytest.fixture
def free_port() -> Callable[[], int]:
    """A function that returns a loopback port that was free a moment ago."""
    return net.free_port


@pytest.fixture
def nats_server(tmp_path: Path) -> Iterator[net.NatsServer]:
    """A running nats-server with JetStream: .url, .kill(), .stop(), .wipe(), .start() on the same port and store."""
    server = net.NatsServer(tmp_path / "jetstream")
    server.start()
    yield server
    server.stop()


@pytest.fixture
async def coordinator(tmp_path: Path, nats_server: net.NatsServer) -> "AsyncIterator[Coordinator]":
    """A running coordinator with a ledger of its own."""
    from specfleet.coordinator.app import Coordinator, Options

    found = Coordinator(Options("127.0.0.1:0", "127.0.0.1:0", nats_server.url, "", tmp_path / "coordinator"))
    await found.start()
    yield found
    await found.stop()


@pytest.fixture
def fleet(coordinator: "Coordinator", nats_server: net.NatsServer) -> "Fleet":
    """The simulated workers' and ranks' view of that coordinator (tests/fixtures/coordinator_life.py)."""
    from fixtures.coordinator_life import Fleet, Store

    return Fleet(f"127.0.0.1:{coordinator.port}", nats_server.url, Store())
