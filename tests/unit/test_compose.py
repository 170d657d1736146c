"""compose/compose.yaml starts what `specctl up` starts: same services, same commands, same order. Needs no engine."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from specfleet.ctl.topology import (
    CAPTURE,
    COORDINATOR,
    GATE,
    MASTER,
    NATS,
    OWNER,
    TRAINER,
    Site,
    embedded_site,
    folder_names,
    port_names,
    stack,
)

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "compose"


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    return yaml.safe_load((COMPOSE / "compose.yaml").read_text())["services"]


@pytest.fixture(scope="module")
def site(services: dict[str, Any]) -> Site:
    """The compose file's own addresses; how they become commands is the topology's business."""
    numbers = {
        NATS: 4222, MASTER: 50051, "mooncake-metrics": 9003, OWNER: 50052, COORDINATOR: 7070, GATE: 7071,
        "coordinator-metrics": 9100, "capture-metrics": 9101, "trainer-metrics": 9102, "gate-metrics": 9103,
    }  # fmt: skip
    owner = services[OWNER]["networks"]["fleet"]["ipv4_address"]
    return Site(
        ports=numbers,
        data={name: "/data" for name in folder_names("mooncake")},
        bind="0.0.0.0",
        hosts={name: name for name in services} | {OWNER: owner},
        shared_memory=False,
        insecure=True,
        pool_bytes=4 << 30,
    )


def expanded(text: str) -> str:
    """Compose's ${NAME:-default} with nothing set."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


def test_commands_are_those_of_the_embedded_stack(services: dict[str, Any], site: Site) -> None:
    expected = {service.name: list(service.argv) for service in stack(site)}
    found = {name: [expanded(str(part)) for part in service["command"]] for name, service in services.items()}
    assert found == expected


def test_the_embedded_stack_gives_the_same_flags() -> None:
    """Only values differ between one machine and many containers, and --insecure, which loopback does not need."""

    def flags(argv: tuple[str, ...]) -> list[str]:
        return [part.split("=")[0] for part in argv if part.startswith("-") and part != "--insecure"]

    ports = {name: 1024 + i for i, name in enumerate(port_names("mooncake"))}
    local = {s.name: flags(s.argv) for s in stack(embedded_site(Path("/x"), ports))}
    far_site = Site(ports=ports, data=dict.fromkeys(folder_names("mooncake"), "/d"), shared_memory=False, insecure=True)
    assert {s.name: flags(s.argv) for s in stack(far_site)} == local


def test_the_engine_is_passed_on() -> None:
    ports = {name: 1024 + i for i, name in enumerate(port_names("mooncake"))}
    site = embedded_site(Path("/x"), ports, engine="sglang")
    [capture] = [service for service in stack(site) if service.name == CAPTURE]
    assert capture.argv[-4:] == ("--engine", "sglang", "--sglang-log", "/x/logs/sglang.log")


def test_services_start_after_what_they_need(services: dict[str, Any], site: Site) -> None:
    for service in stack(site):
        needs = services[service.name].get("depends_on", {})
        assert set(needs) == set(service.after), service.name
        assert all(need["condition"] == "service_healthy" for need in needs.values())
        assert "healthcheck" in services[service.name]
        assert services[service.name]["restart"] == "unless-stopped"


def test_stop_grace_is_the_supervisors(services: dict[str, Any], site: Site) -> None:
    for service in stack(site):
        assert services[service.name]["stop_grace_period"] == f"{service.grace_s:.0f}s", service.name


def test_services_that_load_targets_share_one_cache_of_the_hub(services: dict[str, Any]) -> None:
    for name in (CAPTURE, TRAINER, GATE):
        folder = expanded(services[name]["environment"]["HF_HOME"])
        assert any(folder.startswith(expanded(volume).split(":")[0] + "/") for volume in services[name]["volumes"]), (
            name
        )
        # Set to nothing they would break every download; null passes the host's value on, where it has one.
        assert [services[name]["environment"][key] for key in ("HF_TOKEN", "HF_ENDPOINT", "HF_HUB_OFFLINE")] == [
            None
        ] * 3


def test_ports_are_published_on_loopback_only(services: dict[str, Any]) -> None:
    published = {name: service["ports"] for name, service in services.items() if "ports" in service}
    assert {COORDINATOR, GATE} <= set(published)
    for name, ports in published.items():
        assert all(str(port).startswith("127.0.0.1:") for port in ports), name
    # Neither bus nor pool authenticates anyone.
    assert not {NATS, MASTER, OWNER} & set(published)


@pytest.mark.parametrize("more", [[], ["gpu.yaml"], ["gpu.yaml", "sglang.yaml"], ["postgres.yaml"]])
def test_podman_compose_accepts_the_files(more: list[str], tmp_path: Path) -> None:
    files = ["compose.yaml", *more]
    program = Path(sys.executable).parent / "podman-compose"
    command = [str(program), *(part for name in files for part in ("-f", str(COMPOSE / name))), "config"]
    # podman-compose asks an engine for its version before it even parses; merging and interpolation need none.
    engine = tmp_path / "podman"
    engine.write_text("#!/bin/sh\necho podman version 5.0.0\n")
    engine.chmod(0o755)
    env = os.environ | {"SPECFLEET_DATABASE_PASSWORD": "example", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    merged = yaml.safe_load(done.stdout)
    assert {COORDINATOR, CAPTURE, TRAINER, GATE, NATS, MASTER, OWNER} <= set(merged["services"])
    if "postgres.yaml" in files:
        command_line = merged["services"][COORDINATOR]["command"]
        assert any(str(part).startswith("postgresql+psycopg://") for part in command_line)
    if "sglang.yaml" in files:
        arguments = merged["services"][CAPTURE]["build"]["args"]
        assert set(arguments) == {"TORCH_INDEX_URL=", "MOONCAKE=mooncake", "EXTRAS=capture,sglang"}
    if "gpu.yaml" in files:
        assert merged["services"][CAPTURE]["deploy"]["resources"]["reservations"]["devices"]


@pytest.mark.parametrize("service", [COORDINATOR, CAPTURE, TRAINER, GATE])
def test_each_service_has_an_image_that_runs_as_nobody_special(services: dict[str, Any], service: str) -> None:
    build = services[service]["build"]
    assert (COMPOSE / build["context"]).resolve() == ROOT
    text = (ROOT / build["dockerfile"]).read_text()
    assert re.search(r"^FROM \S+-slim-\w+$", text, re.MULTILINE)
    assert re.search(r"^USER specfleet$", text, re.MULTILINE)
    assert f'CMD ["specfleet-{service}", "--help"]' in text
    if service == COORDINATOR:
        assert "torch" not in text.replace("Holds no torch", "")
