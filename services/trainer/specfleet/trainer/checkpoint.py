"""Checkpoints on disk (docs/design.md §6): safetensors and JSON, durable before they are named, verified before use.

A folder without checkpoint.json does not exist. Its files are written into a hidden folder, fsynced, described by
checkpoint.json (written last), and renamed into place; the sha256 of checkpoint.json is the checkpoint's digest.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
import torch
from google.protobuf.json_format import MessageToDict
from safetensors.torch import load_file, save_file

from specfleet.contracts.capture import contract_hash
from specfleet.contracts.errors import ContractError
from specfleet.drafts.base import Draft
from specfleet.trainer.optim import MasterAdamW
from specfleet.trainer.parallel import Ranks
from specfleet.wire.records_pb2 import CaptureContract

log = structlog.get_logger()

FORMAT = 1
META = "checkpoint.json"
DRAFT = "draft.safetensors"
# Data-parallel ranks hold the same optimizer state, so rank 0's is everybody's.
OPTIMIZER = "optimizer-rank0.safetensors"
_NAME = re.compile(r"step-(\d{8,})")
_PARTIAL_PREFIX = ".partial-"
_READ_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True)
class Facts:
    """What a checkpoint says about the training it belongs to; the same for every checkpoint of one generation."""

    run_id: str
    generation: int
    strategy: str
    identity: Mapping[str, str]
    contract: CaptureContract
    prompt_set: str
    target: str


@dataclass(frozen=True)
class Saved:
    step: int
    uri: str
    digest: str


class CheckpointFolder:
    """The `checkpoints/` folder of one run."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()

    def path(self, step: int) -> Path:
        return self.root / f"step-{step:08d}"

    def clean(self) -> None:
        """Removes what an interrupted write left. Only while no other process writes here (the run's lock is held)."""
        for leftover in self.root.glob(f"{_PARTIAL_PREFIX}*"):
            shutil.rmtree(leftover)

    def steps(self) -> list[int]:
        """Steps of complete checkpoints, ascending."""
        found = [(_NAME.fullmatch(path.name), path) for path in self.root.glob("step-*")]
        return sorted(int(match[1]) for match, path in found if match and (path / META).is_file())

    def rotate(self, keep: int, committed_step: int) -> None:
        """Keeps the newest `keep` checkpoints up to the newest committed one, and that one always."""
        older = [step for step in self.steps() if step < committed_step]
        for step in older[: max(0, len(older) - (keep - 1))]:
            # checkpoint.json first: a folder that is half deleted must not look like a checkpoint.
            (self.path(step) / META).unlink()
            shutil.rmtree(self.path(step))

    def save(self, step: int, facts: Facts, draft: Draft, optimizer: MasterAdamW, ranks: Ranks) -> Saved:
        """Collective. Rank 0 writes what is shared, each rank its own file. One rank's failure is raised on all."""
        partial = self.root / f"{_PARTIAL_PREFIX}{facts.generation}-{step:08d}"
        if ranks.leads:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        ranks.gather({})
        files, error = {}, ""
        try:
            files = _write_rank_files(partial, draft, optimizer, ranks)
        except OSError as problem:
            error = str(problem)
        gathered = ranks.gather({"files": files, "error": error})
        if problems := [f"rank {rank}: {fact['error']}" for rank, fact in enumerate(gathered) if fact["error"]]:
            raise OSError(f"checkpoint of step {step} cannot be written to {partial}: {'; '.join(problems)}")
        digest = ""
        if ranks.leads:
            digest = self._publish(partial, step, facts, draft, ranks.world, [fact["files"] for fact in gathered])
        digest = ranks.gather({"digest": digest})[0]["digest"]
        return Saved(step, str(self.path(step)), digest)

    def _publish(
        self, partial: Path, step: int, facts: Facts, draft: Draft, world: int, files: list[dict[str, str]]
    ) -> str:
        meta = {
            "format": FORMAT,
            "run_id": facts.run_id,
            "step": step,
            "generation": facts.generation,
            "strategy": facts.strategy,
            "draft": {"kind": draft.kind, "config": draft.config.to_dict()},
            "identity": dict(facts.identity),
            "contract": MessageToDict(facts.contract, preserving_proto_field_name=True),
            "contract_hash": contract_hash(facts.contract),
            "prompt_set": facts.prompt_set,
            "target": facts.target,
            "world": world,
            "files": {name: digest for part in files for name, digest in sorted(part.items())},
        }
        data = json.dumps(meta, indent=2, sort_keys=True, ensure_ascii=False).encode()
        _write(partial / META, data)
        _sync(partial)
        final = self.path(step)
        if final.exists():
            # Left by a generation that was fenced before it could commit this step.
            shutil.rmtree(final)
        partial.rename(final)
        _sync(self.root)
        return hashlib.sha256(data).hexdigest()


def read_checkpoint(directory: Path, digest: str = "") -> dict[str, Any]:
    """checkpoint.json, after verifying its digest (when given) and the hash of every file it names.

    Raises ContractError SF-CHECKPOINT-MISSING, SF-CHECKPOINT-FORMAT or SF-CHECKPOINT-HASH.
    """
    try:
        data = (directory / META).read_bytes()
    except OSError as error:
        raise ContractError("SF-CHECKPOINT-MISSING", f"{directory} is not a checkpoint: {error}") from error
    found = hashlib.sha256(data).hexdigest()
    if digest and found != digest:
        raise ContractError("SF-CHECKPOINT-HASH", f"{directory / META} has sha256 {found}, the ledger says {digest}")
    meta: dict[str, Any] = json.loads(data)
    if meta.get("format") != FORMAT:
        raise ContractError(
            "SF-CHECKPOINT-FORMAT",
            f"{directory} has checkpoint format {meta.get('format')!r}, this version reads {FORMAT}",
        )
    for name, expected in meta["files"].items():
        try:
            actual = file_sha256(directory / name)
        except OSError as error:
            raise ContractError("SF-CHECKPOINT-MISSING", f"{directory} lacks {name}: {error}") from error
        if actual != expected:
            raise ContractError(
                "SF-CHECKPOINT-HASH",
                f"{directory / name} has sha256 {actual}, {META} says {expected}: the file was altered",
            )
    return meta


def restore(directory: Path, digest: str, facts: Facts, draft: Draft, optimizer: MasterAdamW, ranks: Ranks) -> Saved:
    """Loads weights, optimizer and this rank's random state.

    Raises ContractError: SF-CHECKPOINT-IDENTITY (shows both values), or what read_checkpoint raises.
    """
    meta = read_checkpoint(directory, digest)
    check_identity(meta, facts, draft)
    draft.load_state_dict(load_file(directory / DRAFT), strict=True)
    optimizer.load(load_file(directory / OPTIMIZER))
    own = directory / _rank_file(ranks.rank)
    if own.is_file():
        _restore_rng(json.loads(own.read_text())["rng"])
    else:
        log.info("no random state for this rank in the checkpoint; seeded afresh", rank=ranks.rank, world=meta["world"])
    return Saved(int(meta["step"]), str(directory), digest)


def check_identity(meta: Mapping[str, Any], facts: Facts, draft: Draft) -> None:
    """Raises ContractError SF-CHECKPOINT-IDENTITY with every fact that differs, as "name: checkpoint A, run B"."""
    own = {
        "strategy": facts.strategy,
        "contract_hash": contract_hash(facts.contract),
        "prompt_set": facts.prompt_set,
        "draft.kind": draft.kind,
        "draft.config": json.loads(json.dumps(draft.config.to_dict())),
        **{f"identity.{name}": value for name, value in facts.identity.items()},
    }
    saved = {
        "strategy": meta["strategy"],
        "contract_hash": meta["contract_hash"],
        "prompt_set": meta["prompt_set"],
        "draft.kind": meta["draft"]["kind"],
        "draft.config": meta["draft"]["config"],
        **{f"identity.{name}": value for name, value in meta["identity"].items()},
    }
    differences = [
        f"{name}: checkpoint {saved.get(name)!r}, run {own.get(name)!r}"
        for name in sorted(own.keys() | saved.keys())
        if saved.get(name) != own.get(name)
    ]
    if differences:
        raise ContractError(
            "SF-CHECKPOINT-IDENTITY",
            f"the checkpoint of step {meta['step']} belongs to a different training: {'; '.join(differences)}",
        )


def file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_READ_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _rank_file(rank: int) -> str:
    return f"trainer-rank{rank}.json"


def _write_rank_files(partial: Path, draft: Draft, optimizer: MasterAdamW, ranks: Ranks) -> dict[str, str]:
    names = [_rank_file(ranks.rank)]
    _write(partial / names[0], json.dumps({"rank": ranks.rank, "rng": _rng()}).encode())
    if ranks.leads:
        for name, tensors in ((DRAFT, draft.state_dict()), (OPTIMIZER, optimizer.state())):
            # Contiguous CPU copies: safetensors refuses views that share storage.
            save_file({key: tensor.detach().cpu().clone() for key, tensor in tensors.items()}, partial / name)
            _sync(partial / name)
            names.append(name)
    return {name: file_sha256(partial / name) for name in names}


def _rng() -> dict[str, str]:
    """Random state as hexadecimal bytes: torch's CPU generator, and the current CUDA device's when one is in use."""
    state = {"cpu": torch.get_rng_state().numpy().tobytes().hex()}
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state().numpy().tobytes().hex()
    return state


def _restore_rng(state: Mapping[str, str]) -> None:
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(state["cpu"]), dtype=torch.uint8))
    if "cuda" in state and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(torch.frombuffer(bytearray.fromhex(state["cuda"]), dtype=torch.uint8))


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    """fsync of a file or folder by path."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
