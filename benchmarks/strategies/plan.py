"""What every case of a comparison shares: written once by the driver, read by each case's process."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.strategies.cases import configure
from specfleet.config import dump_config


@dataclass(frozen=True)
class Plan:
    target: str
    device: str
    batch_size: int
    steps: int
    """Optimizer steps of every case."""
    train: str
    held_out: str
    """URLs of the two feature sets. They hold every layer and fact that any case asks for."""
    measured: tuple[int, ...]
    """Prompt indices of the held-out set on which acceptance is measured."""

    def save(self, work: Path) -> None:
        (work / "plan.json").write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, work: Path) -> "Plan":
        values = json.loads((work / "plan.json").read_text())
        return cls(**{**values, "measured": tuple(values["measured"])})

    def identity(self, case: str) -> str:
        """Changes whenever the result of the case might: what --resume goes by."""
        config = dump_config(configure(case, Path(self.target), self.batch_size))
        return hashlib.sha256(json.dumps([asdict(self), config]).encode()).hexdigest()


def result_file(work: Path, case: str) -> Path:
    return work / "cases" / f"{case}.json"
