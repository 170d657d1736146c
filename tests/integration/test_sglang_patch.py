"""The capture plugin as a patch of SGLang's source, on a copy of the installed package."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from fixtures.sglang import sglang_python

from specfleet.sglang.interpreter import package_dir
from specfleet.sglang.patch import FILE

pytestmark = [pytest.mark.integration, pytest.mark.sglang]

# SGLang skips entry points that this list does not name, as if they were not there.
NO_ENTRY_POINTS = {"SGLANG_PLUGINS": "none"}


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """The package `sglang`, every file a link to the installed one."""
    installed = package_dir(sglang_python())
    return shutil.copytree(installed, tmp_path / "site" / "sglang", copy_function=os.symlink)


def patch(action: str, package: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "specfleet.ctl", "capture", "patch", action, "--sglang", str(package)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_applied_once_and_reverted_to_the_byte(package: Path) -> None:
    file = package / FILE
    stock = file.read_bytes()
    assert patch("verify", package).returncode == 1
    shown = patch("show", package).stdout
    for again in ("", ", and was before"):
        done = patch("apply", package)
        assert done.returncode == 0, done.stderr
        assert done.stderr.endswith(f"is patched{again}\n")
    assert patch("verify", package).returncode == 0
    patched = file.read_bytes()
    assert patched != stock
    assert patch("show", package).stdout == shown

    # What it prints does the same in other hands.
    for tool in (["git", "apply", "-p1"], ["patch", "-p1", "--silent"]):
        if shutil.which(tool[0]):
            assert patch("revert", package).returncode == 0
            assert file.read_bytes() == stock
            subprocess.run(tool, cwd=package.parent, input=shown, text=True, check=True)
            assert file.read_bytes() == patched
    assert patch("revert", package).returncode == 0
    assert patch("revert", package).stderr.endswith("is as released, and was before\n")
    assert file.read_bytes() == stock


@pytest.mark.parametrize("change", ["edited", "gone"])
def test_another_file_is_left_alone(package: Path, change: str) -> None:
    file = package / FILE
    text = file.read_text()
    file.unlink()
    if change == "edited":
        file.write_text(text.replace("_plugins_loaded = True", "_plugins_loaded = True  # ours"))
    for action in ("show", "apply", "verify", "revert"):
        done = patch(action, package)
        assert done.returncode == 3
        assert "[SF-SGLANG-PATCH]" in done.stderr
        assert done.stdout == ""
    assert file.exists() == (change == "edited")


def test_a_patched_sglang_calls_the_plugin(package: Path) -> None:
    """With an entry point as well, it is called once."""
    program = """
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
load_plugins()
print([len(hooks) for hooks in HookRegistry._hooks.values()])
"""

    def hooks(**env: str) -> str:
        capture = f'{{"store": "file://{package.parent}/pool", "layers": [1]}}'
        done = subprocess.run(
            [sglang_python(), "-c", program],
            env=os.environ
            | {"PYTHONPATH": str(package.parent), "SGLANG_USE_CPU_ENGINE": "1", "SPECFLEET_CAPTURE": capture, **env},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    assert hooks(**NO_ENTRY_POINTS) == "[]"
    assert patch("apply", package).returncode == 0
    assert hooks(**NO_ENTRY_POINTS) == "[1, 1, 1, 1, 1]"
    assert hooks() == "[1, 1, 1, 1, 1]"
