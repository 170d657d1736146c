"""The bytes of one shard: a plain safetensors file, one tensor per feature over all its rows, and a small index.

R rows (prompts) with T tokens in all, in the order they were added:

prompt_index, num_tokens, num_loss_tokens [R] int64 · checksums [R, F] uint64, xxh3-64 of each row's bytes per feature, in
feature-table order · then each feature, [T] or [T, per_token]. A row's tokens are contiguous: one read per feature.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from specfleet.contracts.capture import DTYPE_BYTES
from specfleet.data.cache import fsync
from specfleet.data.safetensors import read_header
from specfleet.features.manifest import Shard
from specfleet.store.tensors import Bytes, checksum

FeatureTable = Mapping[str, tuple[str, int]]
"""contracts.capture.feature_table: name → (dtype, elements per token)."""

_SAFETENSORS_DTYPES = {
    "bfloat16": "BF16", "float16": "F16", "float32": "F32", "int64": "I64", "int32": "I32", "uint8": "U8",
}  # fmt: skip
_COLUMNS = ("prompt_index", "num_tokens", "num_loss_tokens")
_CHECKSUMS = "checksums"


@dataclass(frozen=True)
class Sample:
    """One prompt's features as bytes, by name."""

    prompt_index: int
    num_tokens: int
    features: Mapping[str, Bytes]

    @property
    def num_bytes(self) -> int:
        return sum(data.nbytes for data in self.features.values())


@dataclass(frozen=True)
class ShardIndex:
    """Where the rows of one shard lie."""

    prompt_index: npt.NDArray[np.int64]
    num_tokens: npt.NDArray[np.int64]
    num_loss_tokens: npt.NDArray[np.int64]
    checksums: npt.NDArray[np.uint64]
    """[R, F]"""
    begins: Mapping[str, int]
    """Feature → position in the file of its first byte."""


def shard_name(number: int) -> str:
    return f"shard-{number:05d}.safetensors"


def write_shard(directory: Path, number: int, samples: Sequence[Sample], table: FeatureTable) -> Shard:
    """Writes and names one shard durably: under a hidden name, flushed, then renamed."""
    path = directory / shard_name(number)
    partial = directory / f".{path.name}.partial"
    digest, size = hashlib.sha256(), 0
    with partial.open("wb") as file:
        for piece in _pieces(samples, table):
            file.write(piece)
            digest.update(piece)
            size += len(piece)
    fsync(partial)
    partial.rename(path)
    fsync(directory)
    tokens = sum(sample.num_tokens for sample in samples)
    return Shard(path.name, rows=len(samples), tokens=tokens, bytes=size, sha256=digest.hexdigest())


def _pieces(samples: Sequence[Sample], table: FeatureTable) -> Iterator[memoryview]:
    columns = {
        "prompt_index": [sample.prompt_index for sample in samples],
        "num_tokens": [sample.num_tokens for sample in samples],
        "num_loss_tokens": [int(sample.features["loss_mask"].sum()) for sample in samples],
    }
    checksums = [[checksum(sample.features[name]) for name in table] for sample in samples]
    rows, tokens = len(samples), sum(columns["num_tokens"])
    entries, end = {}, 0
    for name, (dtype, shape) in _layout(table, rows, tokens).items():
        begin, end = end, end + _size(dtype, shape)
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    yield memoryview(len(header).to_bytes(8, "little") + header)
    for name in _COLUMNS:
        yield np.asarray(columns[name], dtype=np.int64).data.cast("B")
    yield np.asarray(checksums, dtype=np.uint64).reshape(-1).data.cast("B")
    for name in _by_width(table):
        for sample in samples:
            yield sample.features[name].data


def _by_width(table: FeatureTable) -> list[str]:
    """Widest elements first, so that every tensor is aligned."""
    return sorted(table, key=lambda name: -DTYPE_BYTES[table[name][0]])


def _layout(table: FeatureTable, rows: int, tokens: int) -> dict[str, tuple[str, list[int]]]:
    """Tensor → (safetensors dtype, shape), in file order."""
    layout: dict[str, tuple[str, list[int]]] = {name: ("I64", [rows]) for name in _COLUMNS}
    layout[_CHECKSUMS] = ("U64", [rows, len(table)])
    for name in _by_width(table):
        dtype, width = table[name]
        layout[name] = (_SAFETENSORS_DTYPES[dtype], [tokens] if width == 1 else [tokens, width])
    return layout


def _size(dtype: str, shape: Sequence[int]) -> int:
    width = {"I64": 8, "U64": 8} | {name: DTYPE_BYTES[own] for own, name in _SAFETENSORS_DTYPES.items()}
    return width[dtype] * math.prod(shape)


def read_index(path: Path, shard: Shard, table: FeatureTable) -> ShardIndex:
    """Raises OSError, or ValueError when the file is not the shard its manifest describes."""
    if (size := path.stat().st_size) != shard.bytes:
        raise ValueError(f"it has {size} bytes, its manifest says {shard.bytes}")
    header, data_start = read_header(path)
    layout = _layout(table, shard.rows, shard.tokens)
    for name, (dtype, shape) in layout.items():
        found = header.get(name, {})
        if (found.get("dtype"), found.get("shape")) != (dtype, shape):
            raise ValueError(
                f"{name} is {found.get('dtype')} {found.get('shape')}, contract and manifest say {dtype} {shape}"
            )
    columns: dict[str, Any] = {}
    with path.open("rb") as file:
        for name in (*_COLUMNS, _CHECKSUMS):
            dtype, shape = layout[name]
            file.seek(data_start + header[name]["data_offsets"][0])
            raw = file.read(_size(dtype, shape))
            columns[name] = np.frombuffer(raw, dtype=np.uint64 if dtype == "U64" else np.int64).reshape(shape)
    if int(columns["num_tokens"].sum()) != shard.tokens or bool((columns["num_tokens"] < 1).any()):
        raise ValueError(f"its rows have {int(columns['num_tokens'].sum())} tokens, its manifest says {shard.tokens}")
    return ShardIndex(**columns, begins={name: data_start + int(header[name]["data_offsets"][0]) for name in table})
