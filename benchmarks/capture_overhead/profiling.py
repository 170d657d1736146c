"""Where the threads of a server spend their time: asks its processes (profiler/sitecustomize.py) and prints what they say."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# What a thread must have done to be worth printing, unless it is ours.
BUSY_CORES, OURS = 0.05, "specfleet"
LINES = 10
WRITTEN_S = 20.0


def start(folder: Path) -> None:
    for old in folder.glob("*.json"):
        old.unlink()
    (folder / "on").touch()


async def stop(folder: Path) -> None:
    """Returns when all processes have written what they saw."""
    (folder / "on").unlink(missing_ok=True)
    async with asyncio.timeout(WRITTEN_S):
        while any(folder.glob("*.partial")):  # noqa: ASYNC110  other processes: nothing to wait on
            await asyncio.sleep(0.02)


def read(folder: Path, processes: Mapping[int, str]) -> list[dict[str, Any]]:
    """Of these processes (id → name) the ones with a busy thread, the busiest first; of each its busy threads."""
    found = []
    for pid, name in processes.items():
        path = folder / f"{pid}.json"
        if not path.exists():
            continue  # it runs no Python
        told = json.loads(path.read_text())
        threads = {
            thread: facts
            for thread, facts in told["threads"].items()
            if facts["cores"] >= BUSY_CORES or thread.startswith(OURS)
        }
        if threads:
            found.append({"process": name, **told, "threads": threads})
    return sorted(found, key=lambda process: -sum(facts["cores"] for facts in process["threads"].values()))


def render(processes: list[dict[str, Any]]) -> str:
    lines = []
    for process in processes:
        lines.append(
            f"\n{process['process']}: {process['samples']} samples in {process['seconds']:.1f} s, "
            f"Python's lock is waited for {process['lock_wait_ms']:.2f} ms; garbage collections {_collections(process)}; "
            f"{process['objects']['count']} objects, more than before: {process['objects']['grown']}"
        )
        for name, told in sorted(process["threads"].items(), key=lambda item: -item[1]["cores"]):
            lines.append(
                f"  thread {name}: {told['cores']:.2f} cores, {told['kernel_per_s']:.2f} of them in the kernel; "
                f"per second it slept {told['slept_per_s']:.0f} times and was pushed aside {told['pushed_per_s']:.0f} times"
            )
            for kind in ("own", "total"):
                lines += [
                    f"    {kind:5} {count / process['samples']:6.1%}  {place}" for place, count in told[kind][:LINES]
                ]
    return "\n".join(lines)


def _collections(process: dict[str, Any]) -> str:
    told = process["collections"]
    return ", ".join(
        f"{count} in {seconds:.3f} s" for count, seconds in zip(told["count"], told["seconds"], strict=True)
    )
