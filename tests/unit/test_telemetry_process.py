"""Log lines, exit codes and signals of real service processes."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from specfleet.telemetry.process import peak_rss_bytes

PRELUDE = """
import asyncio, logging, os, sys
import structlog
from specfleet.contracts.errors import *
from specfleet.telemetry import logs
from specfleet.telemetry.process import *
logs.configure("tester")
log = structlog.get_logger()
"""

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    def run(body: str, **environment: str) -> subprocess.CompletedProcess[str]:
        script = tmp_path / "service.py"
        script.write_text(PRELUDE + body)
        return subprocess.run(
            [sys.executable, str(script)], capture_output=True, text=True, timeout=30, env={**os.environ, **environment}
        )

    return run


def lines(result: subprocess.CompletedProcess[str]) -> list[dict[str, object]]:
    assert result.stdout == ""
    return [json.loads(line) for line in result.stderr.splitlines()]


def test_every_line_is_json_with_time_level_service_and_bound_keys(run: Run) -> None:
    result = run(
        'logs.bind(run="r1")\n'
        'log.info("hällo", step=3, path=__import__("pathlib").Path("/x"))\n'
        'log.debug("not shown")\n'
        'logging.getLogger("some.library").warning("from a %s", "library")\n'
        'logging.getLogger("grpc").info("chatter")\n'
        "try:\n    1 / 0\nexcept ZeroDivisionError:\n    log.exception('failed')\n"
    )
    first, library, failed = lines(result)
    assert first["event"] == "hällo"
    assert {first[key] for key in ("level", "service", "run", "path")} == {"info", "tester", "r1", "/x"}
    assert (first["step"], isinstance(first["pid"], int), str(first["time"]).endswith("Z")) == (3, True, True)
    assert (library["event"], library["level"], library["logger"]) == ("from a library", "warning", "some.library")
    assert library["run"] == "r1"
    assert "ZeroDivisionError: division by zero" in str(failed["exception"])


def test_the_level_comes_from_the_environment(run: Run) -> None:
    body = 'log.debug("d")\nlog.warning("w")\nlog.error("e")\n'
    assert [line["event"] for line in lines(run(body, SPECFLEET_LOG_LEVEL="error"))] == ["e"]
    assert [line["event"] for line in lines(run(body, SPECFLEET_LOG_LEVEL="DEBUG"))] == ["d", "w", "e"]
    unknown = lines(run(body, SPECFLEET_LOG_LEVEL="loud"))
    assert [line["event"] for line in unknown] == ["log level is unknown; using info", "w", "e"]
    assert unknown[0]["value"] == "loud"


@pytest.mark.parametrize(
    ("main", "code"),
    [
        ("pass", 0),
        ("return 7", 7),
        ("raise ConfigError('SF-CONFIG-X', 'no')", 2),
        ("raise HostError('SF-HOST-X', 'no')", 3),
        ("raise GateError('SF-GATE-X', 'no')", 4),
        ("raise ValueError('no')", 1),
        ("own_folder(Path(__file__) / 'data')", 3),
    ],
)
def test_exit_codes(run: Run, main: str, code: int) -> None:
    result = run(f"async def main():\n    {main}\nrun_service(main())\n")
    assert result.returncode == code
    found = lines(result)
    if "own_folder" in main:
        (line,) = found
        assert (line["code"], "exception" in line) == ("SF-HOST-DATA-DIR", False)
        assert "service.py/data" in str(line["event"])
    elif "raise" not in main:
        assert found == []
    elif "SF-" in main:
        # One line, without a traceback: the error says everything.
        (line,) = found
        assert (line["event"], line["exit_code"], str(line["code"]).startswith("SF-")) == ("no", code, True)
        assert "exception" not in line
    else:
        assert "ValueError: no" in str(found[0]["exception"])


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_a_service_in_order(tmp_path: Path, sent: signal.Signals) -> None:
    script = tmp_path / "service.py"
    script.write_text(
        PRELUDE + "async def main():\n"
        "    stop = stop_event()\n"
        "    print(type(asyncio.get_running_loop()).__module__, flush=True)\n"
        "    await stop.wait()\n"
        "    print('clean', flush=True)\n"
        "run_service(main())\n"
    )
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "uvloop\n"
        process.send_signal(sent)
        rest, errors = process.communicate(timeout=20)
    assert (process.returncode, rest) == (0, "clean\n")
    assert json.loads(errors)["signal"] == sent.name


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="PR_SET_PDEATHSIG is Linux's")
def test_a_child_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    child = tmp_path / "child.py"
    child.write_text(
        PRELUDE + "die_with_parent(int(sys.argv[1]))\n"
        "async def main():\n"
        "    stop = stop_event()\n"
        "    print('up', flush=True)\n"
        "    await stop.wait()\n"
        "    print('down', flush=True)\n"
        "run_service(main())\n"
    )
    parent = (
        f"import os, subprocess, sys\nsubprocess.Popen([sys.executable, {str(child)!r}, str(os.getpid())]).wait()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", parent], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.kill()
        # The pipe's end arrives only once the child, which inherited it, is gone too.
        assert process.stdout.read() == "down\n"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="PR_SET_PDEATHSIG is Linux's")
def test_a_child_that_is_too_late_ends_at_once(run: Run) -> None:
    result = run("die_with_parent(os.getpid())\nprint('still here')\n")
    assert result.returncode == -signal.SIGTERM


def test_peak_memory_counts_this_process_and_others() -> None:
    before = peak_rss_bytes()
    block = bytearray(64 << 20)
    block[:: 1 << 12] = b"\x01" * (len(block) >> 12)
    assert peak_rss_bytes() >= before
    assert peak_rss_bytes() > 64 << 20
    assert peak_rss_bytes(os.getpid()) == pytest.approx(peak_rss_bytes(), rel=0.1)
    assert peak_rss_bytes(2**22 + 1) == 0
