"""Proof that a feature set is whole: every hash, every row, every value, and the prompt set beside it."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from specfleet.contracts.errors import SpecfleetError
from specfleet.features.feature_set import FeatureSet
from specfleet.features.manifest import MANIFEST
from specfleet.store.tensors import Bytes

# dtype → (unsigned integer of its width, exponent bits): all of them set is NaN or infinity.
_EXPONENT = {"bfloat16": ("u2", 0x7F80), "float16": ("u2", 0x7C00), "float32": ("u4", 0x7F800000)}
MAX_PROBLEMS = 20


@dataclass
class Verdict:
    """Sound when `problems` is empty; of more than MAX_PROBLEMS only the number is kept."""

    path: str
    digest: str
    complete: bool
    rows: int
    dead: int
    missing: int
    tokens: int
    bytes: int
    nonfinite: int = 0
    """NaN and infinite values over all features."""
    num_problems: int = 0
    problems: list[str] = field(default_factory=list)

    def add(self, problem: str) -> None:
        self.num_problems += 1
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(problem)


def verify(path: str | Path) -> Verdict:
    """Reads everything once. Raises DataError when there is no readable manifest, or a shard's index is damaged."""
    found = FeatureSet.open(path)
    manifest, missing = found.manifest, found.missing()
    verdict = Verdict(
        str(found.path), found.digest, manifest.complete, manifest.rows, len(manifest.dead), len(missing),
        manifest.tokens, manifest.num_bytes,
    )  # fmt: skip
    if len(missing):
        verdict.add(f"{len(missing)} of {manifest.num_prompts} prompts are missing, the first is {missing[0]}")
    elif not manifest.complete:
        verdict.add(f"{MANIFEST} does not call the set complete, although every prompt is there")
    overlap = [index for index in manifest.dead if found.num_tokens[index]]
    if overlap:
        verdict.add(f"{len(overlap)} prompts are dead and recorded, the first is {min(overlap)}")
    for shard in manifest.shards:
        with (found.path / shard.file).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != shard.sha256:
            verdict.add(f"{shard.file} has sha256 {digest}, its manifest says {shard.sha256}")
    for problem in _rows(found, verdict):
        verdict.add(problem)
    return verdict


def _rows(found: FeatureSet, verdict: Verdict) -> Iterator[str]:
    recorded = found.num_tokens.nonzero()[0]
    for start in range(0, len(recorded), 256):
        part = recorded[start : start + 256].tolist()
        for prompt in found.prompts.read(part):
            name = f"prompt {prompt.index} in {found.shard_of(prompt.index).file}"
            try:
                features = found.read(prompt.index)
            except SpecfleetError as error:
                yield f"{name}: {error.message}"
                continue
            if features["input_ids"].view(np.int32).tolist() != prompt.input_ids:
                yield f"{name}: its tokens are not those of the prompt set"
            if features["loss_mask"].tobytes() != prompt.loss_mask:
                yield f"{name}: its loss mask is not that of the prompt set"
            for feature, (dtype, _) in found.table.items():
                if bad := _nonfinite(features[feature], dtype):
                    verdict.nonfinite += bad
                    yield f"{name}: {feature} holds {bad} NaN or infinite values"


def _nonfinite(data: Bytes, dtype: str) -> int:
    if dtype not in _EXPONENT:
        return 0
    integer, exponent = _EXPONENT[dtype]
    return int(((data.view(integer) & exponent) == exponent).sum())
