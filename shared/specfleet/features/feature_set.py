"""A feature set, open for reading: which prompts it has, and the bytes of each."""

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from specfleet.contracts.capture import DTYPE_BYTES, feature_table
from specfleet.contracts.errors import DataError, FeatureLostError, StoreError
from specfleet.features.manifest import PROMPTS, Manifest, Shard, read_manifest
from specfleet.features.shard import ShardIndex, read_index
from specfleet.store.tensors import Bytes, checksum

if TYPE_CHECKING:
    from specfleet.data.prompt_set import PromptSet


class FeatureSet:
    """Opening reads the shards' indices (a few bytes per prompt), reading one prompt reads nothing else.

    Threads may read at once.
    """

    def __init__(self, path: Path, manifest: Manifest, digest: str, indices: list[ShardIndex]) -> None:
        self.path = path
        self.manifest = manifest
        self.digest = digest
        self.table = feature_table(manifest.contract)
        self._indices = indices
        self.num_tokens = np.zeros(manifest.num_prompts, dtype=np.int64)
        """Recorded tokens of every prompt, [num_prompts]; 0: not recorded."""
        self.num_loss_tokens = np.zeros_like(self.num_tokens)
        self._shard = np.zeros_like(self.num_tokens)
        self._row = np.zeros_like(self.num_tokens)
        self._first_token = [np.cumsum(index.num_tokens) - index.num_tokens for index in indices]
        for number, index in enumerate(indices):
            prompts = index.prompt_index
            self.num_tokens[prompts] = index.num_tokens
            self.num_loss_tokens[prompts] = index.num_loss_tokens
            self._shard[prompts] = number
            self._row[prompts] = np.arange(len(prompts))

    @classmethod
    def open(cls, path: str | Path) -> "FeatureSet":
        """Compares manifest, sizes and indices; `verify` reads the rest.

        Raises DataError SF-FEATURES-MANIFEST, or SF-FEATURES-DAMAGED naming the shard.
        """
        directory = Path(path).expanduser().resolve()
        manifest, digest = read_manifest(directory)
        table = feature_table(manifest.contract)
        seen = np.zeros(manifest.num_prompts, dtype=np.bool_)
        indices = []
        for shard in manifest.shards:
            try:
                index = read_index(directory / shard.file, shard, table)
                _claim(seen, index.prompt_index)
            except (OSError, ValueError) as error:
                raise DataError("SF-FEATURES-DAMAGED", f"{directory / shard.file}: {error}. {_ADVICE}") from error
            indices.append(index)
        return cls(directory, manifest, digest, indices)

    @cached_property
    def prompts(self) -> "PromptSet":
        """The prompt set inside. Raises DataError when it is damaged, or another one than the manifest names."""
        from specfleet.data.prompt_set import PromptSet

        found = PromptSet.open(self.path / PROMPTS)
        if (found.digest, len(found)) != (self.manifest.prompt_set, self.manifest.num_prompts):
            raise DataError(
                "SF-FEATURES-PROMPTS",
                f"{found.path} is prompt set {found.digest} with {len(found)} prompts; the features were recorded for "
                f"{self.manifest.prompt_set} with {self.manifest.num_prompts}",
            )
        return found

    def missing(self) -> npt.NDArray[np.int64]:
        """Prompts that are neither recorded nor dead, ascending."""
        absent = self.num_tokens == 0
        absent[list(self.manifest.dead)] = False
        return np.flatnonzero(absent)

    def shard_of(self, prompt_index: int) -> Shard:
        return self.manifest.shards[int(self._shard[prompt_index])]

    def read(self, prompt_index: int) -> dict[str, Bytes]:
        """Bytes of every feature of a prompt, checked against its checksums.

        Raises FeatureLostError SF-FEATURES-ABSENT, or SF-FEATURES-DAMAGED naming shard, prompt and feature; StoreError when the
        file system failed.
        """
        if not 0 <= prompt_index < len(self.num_tokens) or self.num_tokens[prompt_index] == 0:
            raise FeatureLostError("SF-FEATURES-ABSENT", f"{self.path} holds no features of prompt {prompt_index}")
        number, row = int(self._shard[prompt_index]), int(self._row[prompt_index])
        index, first = self._indices[number], int(self._first_token[number][row])
        path = self.path / self.manifest.shards[number].file
        found = {}
        try:
            with path.open("rb", buffering=0) as file:
                for column, (name, (dtype, per_token)) in enumerate(self.table.items()):
                    token_bytes = DTYPE_BYTES[dtype] * per_token
                    data = np.empty(token_bytes * int(index.num_tokens[row]), dtype=np.uint8)
                    file.seek(index.begins[name] + first * token_bytes)
                    if file.readinto(data.data) != data.nbytes or checksum(data) != index.checksums[row, column]:
                        raise FeatureLostError(
                            "SF-FEATURES-DAMAGED", f"{path}: {name} of prompt {prompt_index} was altered. {_ADVICE}"
                        )
                    found[name] = data
        except FileNotFoundError as error:
            raise FeatureLostError("SF-FEATURES-DAMAGED", f"{path} is gone. {_ADVICE}") from error
        except OSError as error:
            raise StoreError("SF-FEATURES-READ", f"cannot read {path}: {error}") from error
        return found


_ADVICE = "Put the shard back from a copy and check with specctl data verify, or record the set again"


def _claim(seen: npt.NDArray[np.bool_], prompts: npt.NDArray[np.int64]) -> None:
    outside = prompts[(prompts < 0) | (prompts >= len(seen))]
    if len(outside):
        raise ValueError(f"it holds prompt {outside[0]}, the prompt set has {len(seen)}")
    twice = prompts[seen[prompts]]
    if len(twice) or len(np.unique(prompts)) != len(prompts):
        raise ValueError(f"prompts are recorded twice ({len(twice)} of them in an earlier shard too)")
    seen[prompts] = True
