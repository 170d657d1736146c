"""What has been measured so far: written after every phase, read again by --resume."""

import contextlib
import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

FILE = "result.json"
# What was found in which half of the benchmark; each half has settings of its own.
TRAINING = ("capture", "training", "exports")
SERVING = ("engine", "graphs", "serving", "reference", "offline")


class Results(dict[str, Any]):
    """One section per phase. `out` gets the same document."""

    def __init__(self, work: Path, out: Path, facts: Mapping[str, Any], settings: Mapping[str, Sequence[Any]]) -> None:
        """settings: of "training" and of "serving". What was found under other settings does not count.

        Raises SystemExit when the work folder holds a training under other settings: it is not overwritten.
        """
        super().__init__({name: {} for name in (*TRAINING, *SERVING, "seconds")})
        self._files, self._began = (work / FILE, out), time.monotonic()
        identity = {half: hashlib.sha256(json.dumps(values).encode()).hexdigest() for half, values in settings.items()}
        if self._files[0].exists():
            before = json.loads(self._files[0].read_text())
            if before["identity"]["training"] != identity["training"]:
                raise SystemExit(f"{work} holds a training under other settings: repeat those, or leave out --resume")
            if before["identity"]["serving"] != identity["serving"]:
                before |= {name: {} for name in SERVING}
            self.update(before)
        self.update({**facts, "identity": identity})
        self.save()

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self._began:6.1f} s  {text}", flush=True)

    @contextlib.contextmanager
    def phase(self, title: str) -> Iterator[None]:
        self.say(f"{title} …")
        began = time.monotonic()
        yield
        self["seconds"][title] = round(time.monotonic() - began, 1)
        self.save()
        self.say(f"{title}: {self['seconds'][title]} s")

    def save(self) -> None:
        for path in self._files:
            write(path, self)


def write(path: Path, document: Any) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(document, indent=1) + "\n")
    partial.replace(path)
