"""Memory of a process tree, sampled while something runs."""

import contextlib
import threading
from collections.abc import Iterable

SAMPLE_EVERY_S = 1.0


class MemoryWatch:
    """Largest sum of resident bytes over some process trees, sampled once a second.

    Shared pages (the feature pool, mapped by several processes) count once per process: the sum is an upper bound.
    """

    def __init__(self, roots: Iterable[int]) -> None:
        """roots: pids whose whole trees are watched, each process once."""
        self._roots = list(roots)
        self.peak_bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory-watch", daemon=True)

    def __enter__(self) -> "MemoryWatch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def sample(self) -> int:
        """Sum of resident bytes now."""
        import psutil

        trees = {}
        for root in self._roots:
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(root)
                trees.update({p.pid: p for p in (process, *process.children(recursive=True))})
        total = 0
        for process in trees.values():
            with contextlib.suppress(psutil.Error):
                total += process.memory_info().rss
        self.peak_bytes = max(self.peak_bytes, total)
        return total

    def _run(self) -> None:
        self.sample()
        while not self._stop.wait(SAMPLE_EVERY_S):
            self.sample()
