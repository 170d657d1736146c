"""Fixtures for every test. Helpers live in tests/fixtures and are imported as `fixtures.NAME`."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fixtures import net

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
