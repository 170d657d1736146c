"""Prompt sets on disk (docs/design.md §7): Parquet shards and a manifest. Reading needs pyarrow and numpy only.

A manifest holds no time, host or path, so the same inputs give the same bytes and the same digest on any machine.
"""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from specfleet.contracts.errors import DataError
from specfleet.data.cache import sha256_file

FORMAT = 1
MANIFEST = "manifest.json"
SCHEMA = pa.schema(
    [
        ("id", pa.string()), ("source", pa.string()), ("split", pa.string()), ("finish", pa.string()),
        ("license", pa.string()), ("input_ids", pa.list_(pa.int32())), ("loss_mask", pa.binary()),
        ("num_tokens", pa.int32()), ("num_loss_tokens", pa.int32()), ("prompt_tokens", pa.int32()),
        ("flags", pa.list_(pa.string())),
    ]
)  # fmt: skip
ROWS_PER_SHARD = 16_384
# A random read decodes one group: small enough to be quick, large enough that a sequential read is not all overhead.
ROWS_PER_GROUP = 128
# Decoded row groups kept between reads; a set smaller than this (about 50 million tokens) is decoded once.
_CACHE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row. loss_mask: one byte per token, 1 where the target generated it. prompt_tokens: tokens before the first 1."""

    index: int
    id: str
    source: str
    split: str
    finish: str
    license: str
    input_ids: list[int]
    loss_mask: bytes
    prompt_tokens: int
    flags: tuple[str, ...]

    @property
    def num_loss_tokens(self) -> int:
        return self.loss_mask.count(1)


class PromptSet:
    """A prepared prompt set, open for reading. `prompt_index` is a row's position over all shards."""

    def __init__(self, path: Path, manifest: dict[str, Any], digest: str) -> None:
        self.path = path
        self.manifest = manifest
        self.digest = digest
        self._rows_before = np.cumsum([0, *(shard["rows"] for shard in manifest["shards"])])
        self._files: dict[int, pq.ParquetFile] = {}
        self._groups: OrderedDict[tuple[int, int], pa.Table] = OrderedDict()
        self._cached_bytes = 0
        self._columns: dict[str, npt.NDArray[np.int32]] = {}

    @classmethod
    def open(cls, path: str | Path, verify: bool = True) -> "PromptSet":
        """Opens a directory; verify compares every shard with the manifest's sha256 (sizes are always compared).

        Raises DataError SF-DATA-PROMPT-SET: not a prompt set, another format, or a shard missing, short or altered.
        """
        directory = Path(path).expanduser().resolve()
        try:
            raw = (directory / MANIFEST).read_bytes()
            manifest = json.loads(raw)
            form, shards = manifest["format"], manifest["shards"]
        except FileNotFoundError as error:
            raise _damaged(directory, f"{MANIFEST} does not exist there") from error
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise _damaged(directory, f"{MANIFEST} cannot be read: {error}") from error
        if form != FORMAT:
            raise _damaged(directory, f"its format is {form}, this version reads {FORMAT}")
        for shard in shards:
            file = directory / shard["file"]
            size = file.stat().st_size if file.is_file() else -1
            if size != shard["bytes"]:
                raise _damaged(
                    directory, f"{shard['file']} has {max(size, 0)} bytes, its manifest says {shard['bytes']}"
                )
            if verify and (found := sha256_file(file)) != shard["sha256"]:
                raise _damaged(directory, f"{shard['file']} has sha256 {found}, its manifest says {shard['sha256']}")
        return cls(directory, manifest, hashlib.sha256(raw).hexdigest())

    def __len__(self) -> int:
        return int(self._rows_before[-1])

    def num_tokens_of(self, index: int) -> int:
        return int(self.num_tokens[self._checked(index)])

    @property
    def num_tokens(self) -> npt.NDArray[np.int32]:
        """Tokens of every row, [rows] int32."""
        return self._column("num_tokens")

    @property
    def num_loss_tokens(self) -> npt.NDArray[np.int32]:
        """Supervised tokens of every row, [rows] int32."""
        return self._column("num_loss_tokens")

    def read(self, indices: Sequence[int]) -> list[Prompt]:
        """Rows by index, in the order asked. Raises DataError SF-DATA-INDEX."""
        return [self._prompt(*self._locate(index), index) for index in indices]

    def iter_batches(self, batch_size: int) -> Iterator[list[Prompt]]:
        """All rows in order, `batch_size` at a time."""
        for start in range(0, len(self), batch_size):
            yield self.read(range(start, min(start + batch_size, len(self))))

    def iter_tables(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        """All row groups in order, with some columns only: what statistics need."""
        for shard in range(len(self.manifest["shards"])):
            file = self._file(shard)
            for group in range(file.num_row_groups):
                yield file.read_row_group(group, columns=list(columns))

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()
        self._groups.clear()
        self._cached_bytes = 0

    def _checked(self, index: int) -> int:
        if not 0 <= index < len(self):
            raise DataError("SF-DATA-INDEX", f"prompt {index} does not exist: {self.path} has {len(self)} prompts")
        return index

    def _locate(self, index: int) -> tuple[pa.Table, int]:
        shard = int(np.searchsorted(self._rows_before, self._checked(index), side="right")) - 1
        row = index - int(self._rows_before[shard])
        return self._group(shard, row // ROWS_PER_GROUP), row % ROWS_PER_GROUP

    def _group(self, shard: int, group: int) -> pa.Table:
        key = (shard, group)
        if (table := self._groups.get(key)) is not None:
            self._groups.move_to_end(key)
            return table
        table = self._file(shard).read_row_group(group).combine_chunks()
        self._groups[key] = table
        self._cached_bytes += table.nbytes
        while self._cached_bytes > _CACHE_BYTES and len(self._groups) > 1:
            self._cached_bytes -= self._groups.popitem(last=False)[1].nbytes
        return table

    def _file(self, shard: int) -> pq.ParquetFile:
        if shard not in self._files:
            self._files[shard] = pq.ParquetFile(self.path / self.manifest["shards"][shard]["file"], memory_map=True)
        return self._files[shard]

    def _column(self, name: str) -> npt.NDArray[np.int32]:
        if name not in self._columns:
            parts = [table.column(name).to_numpy() for table in self.iter_tables([name])]
            self._columns[name] = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int32)
        return self._columns[name]

    def _prompt(self, table: pa.Table, row: int, index: int) -> Prompt:
        (values,) = table.slice(row, 1).to_pylist()
        return Prompt(
            index, values["id"], values["source"], values["split"], values["finish"], values["license"],
            values["input_ids"], values["loss_mask"], values["prompt_tokens"], tuple(values["flags"]),
        )  # fmt: skip


class PromptSetWriter:
    """Writes shards into a directory, one row group at a time, and the manifest at the end."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._shards: list[dict[str, Any]] = []
        self._pending: list[dict[str, Any]] = []
        self._writer: pq.ParquetWriter | None = None
        self._rows = self._tokens = 0

    def add(self, row: dict[str, Any]) -> None:
        """row: a value for every column of SCHEMA."""
        self._pending.append(row)
        if len(self._pending) == ROWS_PER_GROUP:
            self._flush()

    def finish(self, manifest: dict[str, Any]) -> None:
        """Writes what is pending and manifest.json = `manifest` + format and shards."""
        self._flush()
        self._close_shard()
        document = {"format": FORMAT, **manifest, "shards": self._shards}
        (self._directory / MANIFEST).write_text(
            json.dumps(document, indent=1, ensure_ascii=False, sort_keys=True) + "\n"
        )

    def abandon(self) -> None:
        """Closes the open file after a failure; its directory is thrown away."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _flush(self) -> None:
        if not self._pending:
            return
        if self._writer is None:
            self._rows = self._tokens = 0
            self._writer = pq.ParquetWriter(self._directory / self._name(), SCHEMA, compression="zstd")
        self._writer.write_table(pa.Table.from_pylist(self._pending, schema=SCHEMA), row_group_size=ROWS_PER_GROUP)
        self._rows += len(self._pending)
        self._tokens += sum(row["num_tokens"] for row in self._pending)
        self._pending.clear()
        if self._rows >= ROWS_PER_SHARD:
            self._close_shard()

    def _close_shard(self) -> None:
        if self._writer is None:
            return
        self._writer.close()
        self._writer = None
        file = self._directory / self._name()
        with file.open("rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
        self._shards.append(
            {
                "file": file.name,
                "rows": self._rows,
                "tokens": self._tokens,
                "bytes": file.stat().st_size,
                "sha256": digest,
            }
        )

    def _name(self) -> str:
        return f"shard-{len(self._shards):05d}.parquet"


def _damaged(directory: Path, why: str) -> DataError:
    return DataError(
        "SF-DATA-PROMPT-SET", f"{directory} is not a usable prompt set: {why}. Prepare it again (specctl data prepare)"
    )
