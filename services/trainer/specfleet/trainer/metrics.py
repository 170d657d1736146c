"""What a run reports: one line per optimizer step in metrics.jsonl, and TensorBoard when asked for and installed."""

import json
import os
from pathlib import Path
from typing import Any

import structlog

log = structlog.get_logger()

FILE = "metrics.jsonl"


class MetricsFile:
    """Rank 0's metrics.jsonl. Opening it drops every step after the restored one, so that no step appears twice."""

    def __init__(self, path: Path, restored_step: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [line for line in _lines(path) if line["step"] <= restored_step]
        partial = path.with_suffix(".partial")
        partial.write_text("".join(json.dumps(line) + "\n" for line in kept))
        partial.replace(path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, line: dict[str, Any]) -> None:
        """`line` holds at least `step`. Visible to readers at once; durable with the next checkpoint (sync)."""
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def sync(self) -> None:
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def last_line(path: Path) -> dict[str, Any] | None:
    """The newest complete line; reads only the end of the file."""
    # A line is a few hundred bytes; the last one is complete or preceded by one that is.
    tail_bytes = 16 * 1024
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - tail_bytes))
            tail = file.read()
    except OSError:
        return None
    for line in reversed(tail.split(b"\n")):
        if (parsed := _parse(line)) is not None:
            return parsed
    return None


class TensorBoard:
    """Scalars under `train/`. Without the package it says so once and does nothing."""

    def __init__(self, directory: Path, restored_step: int) -> None:
        self._writer: Any = None
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            log.warning(
                'tracking.tensorboard needs the package: pip install "specfleet[tensorboard]"; continuing without'
            )
            return
        # purge_step hides what an earlier life of the run wrote after the restored step.
        self._writer = SummaryWriter(str(directory), purge_step=restored_step + 1)

    def write(self, line: dict[str, Any]) -> None:
        if self._writer is not None:
            for name, value in line.items():
                if name not in ("step", "time"):
                    self._writer.add_scalar(f"train/{name}", value, line["step"])

    def sync(self) -> None:
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [parsed for line in path.read_bytes().split(b"\n") if (parsed := _parse(line)) is not None]


def _parse(line: bytes) -> dict[str, Any] | None:
    """None for an empty or torn line."""
    try:
        parsed = json.loads(line)
    except ValueError:
        return None
    return parsed if isinstance(parsed, dict) and "step" in parsed else None
