"""Appends captured samples to a feature set. What a flush has returned for survives a kill at any moment."""

import fcntl
import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from specfleet.contracts.capture import contract_mismatches, feature_table
from specfleet.contracts.errors import DataError, HostError
from specfleet.data.cache import fsync
from specfleet.features.feature_set import FeatureSet
from specfleet.features.manifest import MANIFEST, PROMPTS, Manifest, write_manifest
from specfleet.features.shard import Sample, write_shard
from specfleet.store.tensors import byte_view, dtype_name
from specfleet.target.hub import hub_name
from specfleet.wire.records_pb2 import CaptureContract

if TYPE_CHECKING:
    import torch

    from specfleet.data.prompt_set import PromptSet

# A shard is collected in memory before it is written; larger ones read no faster.
SHARD_BYTES = 256 << 20
_LOCK = ".lock"


class FeatureSetWriter:
    """One writer per directory. Not thread-safe."""

    def __init__(self, directory: Path, manifest: Manifest, recorded: set[int], shard_bytes: int, lock: int) -> None:
        self.directory = directory
        self.manifest = manifest
        self.recorded = recorded
        """Prompts added so far, those of earlier writers included."""
        self._table = feature_table(manifest.contract)
        self._shard_bytes = shard_bytes
        self._lock = lock
        self._pending: list[Sample] = []
        self.pending_bytes = 0
        """Collected for the next shard."""

    @classmethod
    def open(
        cls, directory: Path, contract: CaptureContract, prompts: "PromptSet", shard_bytes: int = SHARD_BYTES
    ) -> "FeatureSetWriter":
        """Begins a set, or goes on after the last shard its manifest lists; whatever is not listed is deleted.

        shard_bytes: `add` closes a shard of this size by itself; 0: only `flush` closes shards.

        Raises DataError SF-FEATURES-OTHER when the directory holds a set of another contract or prompt set or something else,
        SF-FEATURES-DAMAGED; HostError SF-HOST-FEATURES when another process writes there.
        """
        directory = directory.expanduser().resolve()
        lock = _take_lock(directory)
        try:
            if not (directory / MANIFEST).exists():
                manifest = _begin(directory, contract, prompts)
                return cls(directory, manifest, set(), shard_bytes, lock)
            found = FeatureSet.open(directory)
            check_same(found, contract, prompts)
            _delete_unlisted(directory, found.manifest)
            return cls(directory, found.manifest, set(found.num_tokens.nonzero()[0].tolist()), shard_bytes, lock)
        except BaseException:
            os.close(lock)
            raise

    def add(self, prompt_index: int, tensors: "Mapping[str, torch.Tensor]") -> None:
        """Takes a copy of one prompt's features, as a store returned them; writes a shard when enough are pending.

        Raises DataError SF-FEATURES-COMPLETE, SF-FEATURES-TWICE for a prompt that is recorded, SF-FEATURES-SHAPE for tensors
        that the contract does not describe.
        """
        if self.manifest.complete:
            raise DataError("SF-FEATURES-COMPLETE", f"{self.directory} is complete: nothing can be added to it")
        if prompt_index in self.recorded:
            raise DataError("SF-FEATURES-TWICE", f"prompt {prompt_index} is recorded in {self.directory} already")
        num_tokens = int(tensors["input_ids"].shape[0])
        features = {}
        for name, (dtype, per_token) in self._table.items():
            tensor = tensors.get(name)
            if tensor is None or dtype_name(tensor.dtype) != dtype or tensor.numel() != num_tokens * per_token:
                found = "absent" if tensor is None else f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"
                raise DataError(
                    "SF-FEATURES-SHAPE",
                    f"prompt {prompt_index}: {name} is {found}; its {num_tokens} tokens need {dtype} "
                    f"with {per_token} elements each",
                )
            features[name] = byte_view(name, tensor).copy()
        sample = Sample(prompt_index, num_tokens, features)
        self.recorded.add(prompt_index)
        self._pending.append(sample)
        self.pending_bytes += sample.num_bytes
        if self._shard_bytes and self.pending_bytes >= self._shard_bytes:
            self.flush()

    def flush(self) -> None:
        """Closes the shard being collected and lists it: everything added so far is durable when this returns.

        Raises HostError SF-HOST-FEATURES when it cannot be written; it may be tried again.
        """
        if not self._pending:
            return
        try:
            shard = write_shard(self.directory, len(self.manifest.shards), self._pending, self._table)
            self._commit(replace(self.manifest, shards=(*self.manifest.shards, shard)))
        except OSError as error:
            raise HostError(
                "SF-HOST-FEATURES", f"cannot write a shard of {self.pending_bytes} bytes to {self.directory}: {error}"
            ) from error
        self._pending, self.pending_bytes = [], 0

    def finish(self, dead: Mapping[int, str] | None = None) -> Manifest:
        """Declares the set complete. dead: prompts that could not be captured, and why.

        Raises DataError SF-FEATURES-INCOMPLETE when prompts are neither recorded nor dead.
        """
        self.flush()
        gone = {index: reason for index, reason in (dead or {}).items() if index not in self.recorded}
        missing = [i for i in range(self.manifest.num_prompts) if i not in self.recorded and i not in gone]
        if missing:
            raise DataError(
                "SF-FEATURES-INCOMPLETE",
                f"{self.directory} has {len(self.recorded)} of {self.manifest.num_prompts} prompts and {len(gone)} are dead; "
                f"{len(missing)} are missing, the first is {missing[0]}",
            )
        self._commit(replace(self.manifest, complete=True, dead=gone))
        return self.manifest

    def close(self) -> None:
        """Lets go of the directory; what was not flushed is dropped."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _commit(self, manifest: Manifest) -> None:
        write_manifest(self.directory, manifest)
        self.manifest = manifest


def _take_lock(directory: Path) -> int:
    """The kernel frees it when its holder dies, however it dies."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise HostError("SF-HOST-FEATURES", f"cannot write a feature set to {directory}: {error}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        raise HostError("SF-HOST-FEATURES", f"another process is writing the feature set {directory}") from error
    return lock


def check_vacant(directory: Path) -> None:
    """Raises DataError SF-FEATURES-OTHER when a set cannot begin there: it is a file, or holds other things."""
    if not directory.is_dir():
        if directory.exists():
            raise DataError("SF-FEATURES-OTHER", f"{directory} is a file; choose a directory")
        return
    strangers = sorted(
        path.name for path in directory.iterdir() if path.name != PROMPTS and not path.name.startswith(".")
    )
    if strangers:
        raise DataError(
            "SF-FEATURES-OTHER",
            f"{directory} is not a feature set and not empty (it holds {', '.join(strangers[:3])}); choose another directory",
        )


def _begin(directory: Path, contract: CaptureContract, prompts: "PromptSet") -> Manifest:
    check_vacant(directory)
    _copy_prompts(prompts, directory / PROMPTS)
    named = CaptureContract()
    named.CopyFrom(contract)
    # A set moves between machines; a path does not.
    named.target = contract.target if hub_name(contract.target) else Path(contract.target).name
    manifest = Manifest(named, prompts.digest, len(prompts))
    write_manifest(directory, manifest)
    return manifest


def _copy_prompts(prompts: "PromptSet", folder: Path) -> None:
    """Hard links where the file system has them: the shards never change."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name in [MANIFEST, *(shard["file"] for shard in prompts.manifest["shards"])]:
        try:
            (folder / name).hardlink_to(prompts.path / name)
        except OSError:
            shutil.copyfile(prompts.path / name, folder / name)
            fsync(folder / name)
    fsync(folder)


def check_same(found: FeatureSet, contract: CaptureContract, prompts: "PromptSet") -> None:
    """Raises DataError SF-FEATURES-OTHER when a set cannot be continued with this contract and these prompts."""
    differences = contract_mismatches(found.manifest.contract, contract)
    if found.manifest.prompt_set != prompts.digest:
        differences.append(f"prompt set: recorded {found.manifest.prompt_set}, wanted {prompts.digest}")
    if differences:
        raise DataError(
            "SF-FEATURES-OTHER",
            f"{found.path} holds another feature set: {'; '.join(differences)}. Choose another directory",
        )


def _delete_unlisted(directory: Path, manifest: Manifest) -> None:
    """A kill between a shard and its manifest leaves a file that nobody counts."""
    listed = {shard.file for shard in manifest.shards}
    for path in (*directory.glob("shard-*.safetensors"), *directory.glob(".*.partial")):
        if path.name not in listed:
            path.unlink()
