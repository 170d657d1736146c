"""What a result says about where it comes from."""

import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]


def host(module: str, device: torch.device, packages: tuple[str, ...] = ()) -> dict[str, Any]:
    """module: as in python -m MODULE. packages: further ones whose versions matter; those not installed are left out."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("specfleet", "triton", *packages):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    commit = ""
    if shutil.which("git"):
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
        ).stdout.strip()
    return {
        "date": time.strftime("%Y-%m-%d"),
        "command": shlex.join(["python", "-m", module, *sys.argv[1:]]),
        "commit": commit or None,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "versions": found,
    }
