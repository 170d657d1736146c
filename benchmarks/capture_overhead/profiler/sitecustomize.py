"""Put on a server's PYTHONPATH by the benchmark: each of its Python processes can be asked where its threads spend their time.

While FOLDER/on exists, all threads are sampled (FOLDER/PID.json.partial is there meanwhile); when it is gone, FOLDER/PID.json
says what was seen. Until then one thread wakes twice a second. It samples with Python's global lock in its hand: a thread that
computes without it shows the call it made, and `lock_wait_ms`, by which its own wake-ups are late, says how long one waits for
that lock.
"""

import collections
import gc
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


def _usage() -> dict[str, dict[str, float]]:
    """Of each thread so far: processor seconds in user and kernel mode, and how often it slept or was pushed off its core."""
    used: dict[str, dict[str, float]] = collections.defaultdict(lambda: collections.defaultdict(float))
    tick = os.sysconf("SC_CLK_TCK")
    for thread in threading.enumerate():
        folder = f"/proc/self/task/{thread.native_id}"
        try:
            with open(f"{folder}/stat", encoding="ascii", errors="replace") as stat:
                fields = stat.read().rpartition(")")[2].split()
            with open(f"{folder}/status", encoding="ascii", errors="replace") as status:
                switches = {line.partition(":")[0]: line.split()[-1] for line in status if "ctxt_switches" in line}
        except OSError:  # ended meanwhile
            continue
        own = used[thread.name]
        own["user"] += int(fields[11]) / tick
        own["kernel"] += int(fields[12]) / tick
        own["slept"] += int(switches["voluntary_ctxt_switches"])
        own["pushed"] += int(switches["nonvoluntary_ctxt_switches"])
    return used


class _Collections:
    """Time that Python's garbage collections took, by generation."""

    def __init__(self) -> None:
        self.count, self.seconds = [0, 0, 0], [0.0, 0.0, 0.0]
        self._began = 0.0

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._began = time.perf_counter()
        else:
            self.count[info["generation"]] += 1
            self.seconds[info["generation"]] += time.perf_counter() - self._began


def _objects() -> collections.Counter[str]:
    return collections.Counter(type(item).__qualname__ for item in gc.get_objects())


def _sample(switch: str) -> dict[str, object]:
    own: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    total: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    samples, late_s, objects, collected = 0, 0.0, _objects(), _Collections()
    gc.callbacks.append(collected)
    before, began = _usage(), time.monotonic()
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
    seconds, after = time.monotonic() - began, _usage()
    gc.callbacks.remove(collected)
    now = _objects()
    return {
        "samples": samples,
        "seconds": seconds,
        "lock_wait_ms": late_s / max(samples, 1) * 1e3,
        "collections": {"count": collected.count, "seconds": collected.seconds},
        "objects": {"count": now.total(), "grown": (now - objects).most_common(12)},
        "threads": {
            name: {
                **{f"{kind}_per_s": (used - before[name][kind]) / seconds for kind, used in after[name].items()},
                "cores": sum(after[name][kind] - before[name][kind] for kind in ("user", "kernel")) / seconds,
                "own": own[name].most_common(12),
                "total": total[name].most_common(25),
            }
            for name in own
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
