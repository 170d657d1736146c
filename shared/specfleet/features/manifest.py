"""What a feature set says about itself: manifest.json. Neither torch nor any tensor is needed to read it.

It holds no time, host or absolute path. Its sha256 is the set's digest, final once the set is complete.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict, ParseDict, ParseError

from specfleet.contracts.capture import contract_hash, feature_table
from specfleet.contracts.errors import DataError
from specfleet.data.cache import fsync
from specfleet.wire.records_pb2 import CaptureContract

FORMAT = 1
KIND = "specfleet-feature-set"
MANIFEST = "manifest.json"
# The prompt set lies inside, so that the directory is all a run needs.
PROMPTS = "prompts"


@dataclass(frozen=True)
class Shard:
    """One file. rows: prompts; tokens: their sum."""

    file: str
    rows: int
    tokens: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    contract: CaptureContract
    """Its `target` is a name, not a path."""
    prompt_set: str
    """Digest of the prompt set the features belong to."""
    num_prompts: int
    complete: bool = False
    """Every prompt is in a shard or dead; nothing will be added."""
    shards: tuple[Shard, ...] = ()
    dead: Mapping[int, str] = field(default_factory=dict)
    """Prompt index → why it could not be captured."""

    @property
    def contract_hash(self) -> str:
        return contract_hash(self.contract)

    @property
    def rows(self) -> int:
        return sum(shard.rows for shard in self.shards)

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    @property
    def num_bytes(self) -> int:
        return sum(shard.bytes for shard in self.shards)

    def encode(self) -> bytes:
        document = {
            "kind": KIND,
            "format": FORMAT,
            "complete": self.complete,
            "contract": MessageToDict(self.contract, preserving_proto_field_name=True),
            "contract_hash": self.contract_hash,
            "features": {
                name: {"dtype": dtype, "per_token": per_token}
                for name, (dtype, per_token) in feature_table(self.contract).items()
            },
            "prompt_set": {"digest": self.prompt_set, "prompts": self.num_prompts},
            "counts": {"rows": self.rows, "tokens": self.tokens, "bytes": self.num_bytes, "dead": len(self.dead)},
            "dead": {str(index): reason for index, reason in sorted(self.dead.items())},
            "shards": [vars(shard) for shard in self.shards],
        }
        return (json.dumps(document, indent=1, ensure_ascii=False) + "\n").encode()

    @classmethod
    def decode(cls, document: Any) -> "Manifest":
        """From parsed JSON. Raises KeyError, TypeError, ValueError or ParseError when it is not a manifest of this format."""
        if document.get("kind") != KIND:
            raise ValueError(f"its kind is {document.get('kind')!r}, not {KIND!r}")
        if document["format"] != FORMAT:
            raise ValueError(f"its format is {document['format']}, this version reads {FORMAT}")
        contract = ParseDict(document["contract"], CaptureContract())
        if contract_hash(contract) != document["contract_hash"]:
            raise ValueError(f"its contract does not have the hash {document['contract_hash']}")
        dead = {int(index): str(reason) for index, reason in document["dead"].items()}
        num_prompts = int(document["prompt_set"]["prompts"])
        if outside := [index for index in dead if not 0 <= index < num_prompts]:
            raise ValueError(f"it calls prompt {outside[0]} dead, the prompt set has {num_prompts}")
        return cls(
            contract=contract,
            prompt_set=document["prompt_set"]["digest"],
            num_prompts=num_prompts,
            complete=document["complete"],
            shards=tuple(Shard(**shard) for shard in document["shards"]),
            dead=dead,
        )


def is_feature_set(directory: Path) -> bool:
    """Whether the directory's manifest is one of a feature set (and not, say, of a prompt set)."""
    try:
        return bool(json.loads((directory / MANIFEST).read_bytes())["kind"] == KIND)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def read_manifest(directory: Path) -> tuple[Manifest, str]:
    """(manifest, digest). Raises DataError SF-FEATURES-MANIFEST when there is none, or none that can be read."""
    path = directory / MANIFEST
    try:
        raw = path.read_bytes()
        return Manifest.decode(json.loads(raw)), hashlib.sha256(raw).hexdigest()
    except FileNotFoundError as error:
        raise DataError(
            "SF-FEATURES-MANIFEST", f"{directory} is not a feature set: {MANIFEST} does not exist there"
        ) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ParseError) as error:
        raise DataError(
            "SF-FEATURES-MANIFEST", f"{path} is not the manifest of a feature set: {type(error).__name__}: {error}"
        ) from error


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Replaces the manifest durably: a reader, or a crash, meets the old one or the new one."""
    partial = directory / f".{MANIFEST}.partial"
    partial.write_bytes(manifest.encode())
    fsync(partial)
    partial.replace(directory / MANIFEST)
    fsync(directory)
