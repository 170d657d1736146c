"""The command line as a user meets it: help, wrong input, exit codes, one-line errors. Real processes."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from specfleet.contracts.errors import HostError
from specfleet.ctl.client import find_address
from specfleet.ctl.state import DEMO_STATE_DIR, StackLock, StackState, write_state

CONFIG = "model: {target: /nowhere/target}\ndata: {train: [conversations.jsonl]}\n"


def specctl(*args: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SPECFLEET_")}
    command = [sys.executable, "-m", "specfleet.ctl", *args]
    return subprocess.run(command, cwd=cwd, env=clean | env, capture_output=True, text=True, timeout=60, check=False)


# typer itself builds its converters of paths with pydantic, so a command's own help may hold it.
@pytest.mark.parametrize(("command", "unavoidable"), [((), ()), (("run", "submit"), ("pydantic_core",))])
def test_help_imports_nothing_heavy(tmp_path: Path, command: tuple[str, ...], unavoidable: tuple[str, ...]) -> None:
    program = (
        f"import sys; sys.argv = ['specctl', *{command!r}, '--help']\n"
        "from specfleet.ctl.__main__ import main\n"
        "try: main()\n"
        "except SystemExit as end: assert end.code == 0, end.code\n"
        "heavy = {'grpc', 'torch', 'transformers', 'pydantic_core', 'numpy', 'rich', 'google.protobuf', 'nats', 'psutil',"
        " 'yaml', 'sqlalchemy', 'pyarrow'}\n"
        f"print(sorted(heavy & set(sys.modules) - {set(unavoidable)!r}), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60
    )
    assert "Usage: specctl" in done.stdout
    assert done.stderr.strip() == "[]"


@pytest.mark.parametrize(
    "command",
    [
        ("up",), ("down",), ("status",), ("demo",), ("doctor",), ("data", "prepare"), ("data", "regenerate"),
        ("data", "capture"),
        ("data", "stats"), ("data", "verify"),
        ("run", "submit"), ("run", "list"),
        ("run", "show"), ("run", "watch"), ("run", "pause"), ("run", "resume"), ("run", "cancel"), ("run", "logs"),
        ("fleet", "list"), ("sample", "explain"), ("checkpoint", "list"), ("export",), ("gate", "run"), ("gate", "show"),
        ("ledger", "verify"), ("config", "check"),
    ],
)  # fmt: skip
def test_every_command_has_help_and_json(command: tuple[str, ...]) -> None:
    from typer.testing import CliRunner

    from specfleet.ctl.app import app

    result = CliRunner().invoke(app, [*command, "--help"])
    assert result.exit_code == 0, result.output
    assert "--json" in result.output


def test_an_unknown_key_shows_the_nearest_name(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(CONFIG + "trainer: {epoch: 3}\n")
    done = specctl("config", "check", "run.yaml", cwd=tmp_path)
    assert done.returncode == 2
    assert "[SF-CONFIG-UNKNOWN-KEY]" in done.stderr
    assert "did you mean 'epochs'" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""


def test_errors_are_json_on_stdout_when_asked(tmp_path: Path) -> None:
    done = specctl("config", "check", "missing.yaml", "--json", cwd=tmp_path)
    assert done.returncode == 2
    error = json.loads(done.stdout)["error"]
    assert error["code"] == "SF-CONFIG-MISSING"
    assert error["exit_code"] == 2
    assert len(done.stderr.splitlines()) == 1


def test_a_good_configuration_is_printed_resolved(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(CONFIG)
    done = specctl("config", "check", "run.yaml", "-s", "trainer.epochs=3", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["trainer"]["epochs"] == 3
    schema = json.loads(specctl("config", "schema", cwd=tmp_path).stdout)
    assert "trainer" in schema["properties"]


def test_without_a_stack_the_message_says_what_to_do(tmp_path: Path) -> None:
    for command in (("run", "list"), ("status",), ("ledger", "verify", "x"), ("fleet", "list"), ("gate", "show", "x")):
        done = specctl(*command, cwd=tmp_path)
        assert done.returncode == 3, command
        assert "specctl up --detach" in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_a_demo_that_alone_runs_here_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder, address in ((DEMO_STATE_DIR, "demo:1"), (Path(".specfleet"), "own:1")):
        folder.mkdir(parents=True)
        write_state(folder, StackState(addresses={"coordinator": address}))
    demo, own = StackLock(DEMO_STATE_DIR), StackLock(Path(".specfleet"))
    assert demo.acquire()
    assert find_address("coordinator", "", None) == "demo:1"
    with pytest.raises(HostError, match="no stack runs in elsewhere"):
        find_address("coordinator", "", Path("elsewhere"))
    assert own.acquire()
    assert find_address("coordinator", "", None) == "own:1"
    demo.release()
    own.release()


def test_an_unreachable_coordinator_is_one_line_and_exit_3(tmp_path: Path) -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))  # bound and not listening: refuses connections, and nobody else gets it
        address = f"127.0.0.1:{reserved.getsockname()[1]}"
        flag = specctl("run", "list", "--coordinator", address, cwd=tmp_path)
        variable = specctl("fleet", "list", cwd=tmp_path, SPECFLEET_COORDINATOR=address)
    for done in (flag, variable):
        assert done.returncode == 3
        assert address in done.stderr
        assert len(done.stderr.splitlines()) == 1
        assert done.stdout == ""


def test_a_wanted_port_in_use_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for detach in ((), ("--detach",)):
            done = specctl("up", *detach, "--store", "directory", "--port", f"coordinator={port}", cwd=tmp_path)
            assert done.returncode == 3, done.stderr
            assert f"port {port} for coordinator" in done.stderr
            assert "SF-HOST-PORT" in done.stderr
    assert not (tmp_path / ".specfleet" / "stack.json").exists()
    assert specctl("down", cwd=tmp_path).returncode == 0


def test_wrong_options_are_usage_errors(tmp_path: Path) -> None:
    for args in (("--port", "coordinator=70000"), ("--port", "nonsense"), ("--pool", "much"), ("--store", "tape")):
        done = specctl("up", *args, cwd=tmp_path)
        assert done.returncode == 2, args
        assert args[1] in done.stderr
        assert "[SF-CTL-USAGE]" in done.stderr
        assert len(done.stderr.splitlines()) == 1
    done = specctl("up", "--store", "directory", "--port", "coffee=7000", cwd=tmp_path)
    assert done.returncode == 2
    assert "no port is named coffee; the names are nats" in done.stderr
    unknown = specctl("frobnicate", "--json", cwd=tmp_path)
    assert unknown.returncode == 2
    assert unknown.stderr == "specctl: [SF-CTL-USAGE] No such command 'frobnicate'. Try specctl --help\n"
    assert json.loads(unknown.stdout)["error"]["code"] == "SF-CTL-USAGE"
    assert specctl("run", "show", cwd=tmp_path).stderr.endswith("Try specctl run show --help\n")
    group = specctl("run", cwd=tmp_path)
    assert group.returncode == 2
    assert "Commands:" in group.stderr
    # Before anything is asked of a stack, which does not run here.
    for args in (("--rule", "majority"), ("--serve", "tape"), ("--max-rows", "-2"), ("--eval", "a", "--eval-set", "b")):
        done = specctl("gate", "run", "x", *args, cwd=tmp_path)
        assert done.returncode == 2, args
        assert args[0] in done.stderr
    assert specctl("run", "logs", "x", "--lines", "0", cwd=tmp_path).returncode == 2


def test_a_directory_that_holds_no_set(tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "manifest.json").write_text('{"format": 1}')
    (tmp_path / "features" / "prompts").mkdir(parents=True)
    (tmp_path / "features" / "manifest.json").write_text("{")
    for command in ("stats", "verify"):
        for directory, code in ((".", "NO-SET"), ("broken", "PROMPT-SET"), ("features", "MANIFEST")):
            done = specctl("data", command, directory, cwd=tmp_path)
            assert done.returncode == 2, done.stderr
            assert code in done.stderr
            assert len(done.stderr.splitlines()) == 1


def test_an_interpreter_without_python_is_named(tmp_path: Path) -> None:
    done = specctl("capture", "verify-engine", "--python", "/bin/true", cwd=tmp_path)
    assert done.returncode == 3
    assert "[SF-SGLANG-PYTHON] /bin/true" in done.stderr


def test_regeneration_says_what_it_needs(tmp_path: Path) -> None:
    command = ("data", "regenerate", "chats.jsonl", "--out", "out.jsonl")
    nobody = specctl(*command, cwd=tmp_path)
    assert nobody.returncode == 2
    assert "Give --endpoint URL, --target DIR or both" in nobody.stderr
    for wrong in ("{enable_thinking}", "[1]"):
        bad = specctl(*command, "--endpoint", "http://127.0.0.1:1", "--template-kwargs", wrong, cwd=tmp_path)
        assert bad.returncode == 2
        assert "--template-kwargs" in bad.stderr
    # Nobody waits for a server, or starts one, only to hear that there is nothing to ask.
    missing = specctl(*command, "--endpoint", "http://127.0.0.1:1", cwd=tmp_path)
    assert missing.returncode == 2
    assert "[SF-DATA-MISSING] conversation file chats.jsonl does not exist" in missing.stderr


def test_a_bad_sample_id_is_explained(tmp_path: Path) -> None:
    done = specctl("sample", "explain", "nonsense", "--coordinator", "127.0.0.1:1", cwd=tmp_path)
    assert done.returncode == 2
    assert "expected RUN/eEEEE-pIIIIIIIII" in done.stderr


@pytest.mark.parametrize(
    ("text", "count"), [("512M", 512 << 20), ("1G", 1 << 30), ("1.5GiB", 3 << 29), ("4096", 4096), ("2kb", 2048)]
)
def test_sizes(text: str, count: int) -> None:
    from specfleet.ctl.commands.stack import parse_bytes

    assert parse_bytes(text) == count


def test_a_stack_without_sglang_is_refused_before_it_starts(tmp_path: Path) -> None:
    done = specctl(
        "up", "--store", "directory", "--engine", "sglang", cwd=tmp_path, SPECFLEET_SGLANG_PYTHON="/nowhere/python"
    )
    assert done.returncode == 3
    assert "[SF-SGLANG-PYTHON]" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_doctor_names_what_is_missing(tmp_path: Path) -> None:
    done = specctl("doctor", "--store", "directory", "--json", cwd=tmp_path)
    document = json.loads(done.stdout)
    names = {finding["name"] for finding in document["findings"]}
    assert {"python", "memory", "disk", "nats-server", "loopback ports", "wire code", "torch"} <= names
    assert done.returncode == (0 if document["healthy"] else 3)
    assert all(finding["remedy"] for finding in document["findings"] if finding["level"] == "fail")


def test_doctor_works_where_only_the_base_dependencies_are(tmp_path: Path) -> None:
    hidden = (
        "torch",
        "transformers",
        "safetensors",
        "aiohttp",
        "sqlalchemy",
        "pyarrow",
        "mooncake",
        "sglang",
        "psutil",
    )
    blocker = f"import sys\nsys.modules.update(dict.fromkeys({hidden!r}))\n"
    (tmp_path / "sitecustomize.py").write_text(blocker)
    done = specctl("doctor", "--json", cwd=tmp_path, PYTHONPATH=os.pathsep.join([str(tmp_path), *sys.path]))
    findings = json.loads(done.stdout)["findings"]
    assert "sglang" in {finding["name"] for finding in findings}
    assert not [finding for finding in findings if "this check itself" in finding["remedy"]]
