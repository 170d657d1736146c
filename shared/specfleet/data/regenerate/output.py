"""The output file: JSON Lines that only grow, so that a killed run goes on where it stopped."""

import fcntl
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any, Self

from specfleet.contracts.errors import ConfigError, DataError, HostError


class OutputFile:
    """Use as a context manager. `done`: content hashes of the rows that are there; `finish`: their finish reasons.

    Raises HostError SF-REGEN-BUSY (another process writes it), DataError SF-REGEN-OUT (not such a file), ConfigError
    SF-REGEN-SETTINGS (made with another model or other sampling).
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path, self._settings = path, settings
        self.done: set[str] = set()
        self.finish: Counter[str] = Counter()
        self.with_ids = 0

    def __enter__(self) -> Self:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise HostError("SF-REGEN-BUSY", f"another process is writing {self.path}") from None
        try:
            self._read()
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with self._file:
            self._file.flush()
            os.fsync(self._file.fileno())

    def append(self, row: dict[str, Any]) -> None:
        """One write per row: what was handed to the kernel survives the death of this process."""
        self._file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
        self._file.flush()
        self._count(row)

    def _read(self) -> None:
        self._file.seek(0)
        end = 0
        for number, line in enumerate(self._file, 1):
            if not line.endswith(b"\n"):
                break  # the row that was being written when the last run died
            self._count(self._parse(number, line))
            end += len(line)
        self._file.truncate(end)

    def _parse(self, number: int, line: bytes) -> dict[str, Any]:
        try:
            row: dict[str, Any] = json.loads(line)
            note = row["regenerated"]
            settings = {name: note[name] for name in self._settings}
            str(note["content"]), str(row["finish"])
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                "SF-REGEN-OUT",
                f"{self.path} line {number} is not a row that this command wrote ({error!r}); choose another --out",
            ) from error
        if settings != self._settings:
            differing = [f"{k}: {settings[k]} there, {v} now" for k, v in self._settings.items() if settings[k] != v]
            raise ConfigError(
                "SF-REGEN-SETTINGS",
                f"{self.path} holds rows made otherwise ({'; '.join(differing)}); choose another --out",
            )
        return row

    def _count(self, row: dict[str, Any]) -> None:
        self.done.add(row["regenerated"]["content"])
        self.finish[row["finish"]] += 1
        self.with_ids += "response_token_ids" in row
