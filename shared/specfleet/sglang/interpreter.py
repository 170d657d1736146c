"""Which Python runs SGLang, since its pins may contradict ours, and which SGLang that is."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from specfleet.contracts.errors import HostError


def find_python(given: str = "") -> str:
    """The interpreter that runs SGLang: `given`, else this one where SGLang is installed, else .venv-sglang of the checkout.

    Raises HostError SF-SGLANG-PYTHON when none is there.
    """
    if given:
        if not os.access(given, os.X_OK):
            raise HostError(
                "SF-SGLANG-PYTHON",
                f"{given!r}, named as the interpreter that has SGLang, is not a program that can be run",
            )
        return given
    if importlib.util.find_spec("sglang") is not None:
        return sys.executable
    beside = Path(__file__).parents[3] / ".venv-sglang" / "bin" / "python"
    if beside.exists():
        return str(beside)
    raise HostError(
        "SF-SGLANG-PYTHON",
        f"SGLang is neither installed for {sys.executable} nor in {beside.parents[1]}: pip install "
        f"'specfleet[capture,sglang]' on a GPU host, scripts/setup.sh sglang in a checkout, or name an interpreter that has "
        "it with --sglang-python",
    )


def sglang_version(python: str) -> str:
    """Raises HostError SF-SGLANG-MISSING."""
    return _ask(python, "import importlib.metadata as m; print(m.version('sglang'))")


def package_dir(python: str) -> Path:
    """The directory of its package `sglang`. Raises HostError SF-SGLANG-MISSING."""
    # Without importing it: that takes seconds.
    return Path(_ask(python, "import importlib.util as u; print(u.find_spec('sglang').submodule_search_locations[0])"))


def _ask(python: str, program: str) -> str:
    done = subprocess.run([python, "-c", program], capture_output=True, text=True, check=False)
    if done.returncode or not done.stdout.strip():
        raise HostError("SF-SGLANG-MISSING", f"SGLang is not installed for {python}")
    return done.stdout.strip()
