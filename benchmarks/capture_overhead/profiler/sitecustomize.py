"""Put on a server's PYTHONPATH by the benchmark: each of its Python processes can be asked where its threads spend their time.

While FOLDER/on exists, all threads are sampled (FOLDER/PID.json.partial is there meanwhile); when it is gone, FOLDER/PID.json
says what was seen. Until then one thread wakes twice a second. It samples with Python's global lock in its hand: a thread that
computes without it shows the call it made, and `lock_wait_ms`, by which its own wake-ups are late, says how long one waits for
that lock.
"""

import collections
import json
import os
import sys
import threading
import time
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from types import FrameType

INTERVAL_S = 0.005
DEPTH = 30


def _function(frame: FrameType) -> str:
    code = frame.f_code
    return f"{'/'.join(code.co_filename.split('/')[-2:])} {code.co_name}"


def _cpu_seconds(native_id: int | None) -> float:
    with open(f"/proc/self/task/{native_id}/stat", encoding="ascii", errors="replace") as stat:
        fields = stat.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _cpu() -> dict[str, float]:
    used: dict[str, float] = collections.defaultdict(float)
    for thread in threading.enumerate():
        try:
            used[thread.name] += _cpu_seconds(thread.native_id)
        except OSError:  # ended meanwhile
            continue
    return used


def _sample(switch: str) -> dict[str, object]:
    own: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    total: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    samples, late_s, before, began = 0, 0.0, _cpu(), time.monotonic()
    while os.path.exists(switch):
        woken = time.monotonic()
        time.sleep(INTERVAL_S)
        late_s += time.monotonic() - woken - INTERVAL_S
        samples += 1
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        for ident, top in sys._current_frames().items():
            if ident == threading.get_ident():
                continue
            name, functions = names.get(ident, "?"), set[str]()
            frame: FrameType | None = top
            own[name][f"{_function(top)}:{top.f_lineno}"] += 1
            while frame is not None and len(functions) < DEPTH:
                functions.add(_function(frame))
                frame = frame.f_back
            total[name].update(functions)
    seconds = time.monotonic() - began
    return {
        "samples": samples,
        "seconds": seconds,
        "lock_wait_ms": late_s / max(samples, 1) * 1e3,
        "threads": {
            name: {
                "cores": (used - before.get(name, 0.0)) / seconds,
                "own": own[name].most_common(12),
                "total": total[name].most_common(25),
            }
            for name, used in _cpu().items()
            if name in own
        },
    }


def _watch(folder: str) -> None:
    switch = os.path.join(folder, "on")
    while True:
        time.sleep(0.5)
        if os.path.exists(switch):
            path = os.path.join(folder, f"{os.getpid()}.json")
            with open(f"{path}.partial", "w", encoding="utf-8") as file:
                json.dump(_sample(switch), file)
            os.replace(f"{path}.partial", path)


def _run_shadowed() -> None:
    """The sitecustomize that this file hides, if there is one."""
    own = os.path.dirname(os.path.abspath(__file__))
    spec = PathFinder.find_spec("sitecustomize", [path for path in sys.path if os.path.abspath(path) != own])
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(module_from_spec(spec))


_run_shadowed()
if os.environ.get("SPECFLEET_BENCH_PROFILE"):
    threading.Thread(
        target=_watch, args=(os.environ["SPECFLEET_BENCH_PROFILE"],), name="bench-profiler", daemon=True
    ).start()
