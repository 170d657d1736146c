"""The compose file for real: builds the images and runs the stack. Opt-in (`-m containers`); needs docker or podman."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.containers, pytest.mark.timeout(3600)]

ROOT = Path(__file__).parents[2]


def compose_command() -> list[str] | None:
    """`docker compose` where it works, else podman-compose beside this interpreter with podman on PATH."""
    if shutil.which("docker"):
        asked = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
        if (
            asked.returncode == 0
            and subprocess.run(["docker", "info"], capture_output=True, check=False).returncode == 0
        ):
            return ["docker", "compose"]
    if shutil.which("podman"):
        return [str(Path(sys.executable).parent / "podman-compose")]
    return None


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    command = compose_command()
    if command is None:
        pytest.skip("no container engine answers")
    shared = tmp_path_factory.mktemp("shared")
    shared.chmod(0o777)
    env = os.environ | {"SPECFLEET_SHARED": str(shared), "SPECFLEET_POOL_BYTES": str(256 << 20)}
    base = [*command, "-f", str(ROOT / "compose" / "compose.yaml"), "-p", "specfleet-test"]
    try:
        subprocess.run([*base, "up", "-d", "--build"], env=env, check=True)
        yield env | {"SPECFLEET_COORDINATOR": "127.0.0.1:7070", "SPECFLEET_GATE": "127.0.0.1:7071"}
    finally:
        subprocess.run([*base, "down", "-v"], env=env, check=False)


def test_the_fleet_registers(stack: dict[str, str]) -> None:
    command = [sys.executable, "-m", "specfleet.ctl", "fleet", "list", "--json"]
    deadline = time.monotonic() + 300
    kinds: set[str] = set()
    while kinds != {"capture", "trainer"}:
        assert time.monotonic() < deadline, f"only {kinds or 'nobody'} registered"
        done = subprocess.run(command, env=stack, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            kinds = {member["kind"] for member in json.loads(done.stdout)["members"]}
        time.sleep(1)
