"""Conversation files: JSON, JSON Lines and Parquet, optionally .gz, read row by row with a place to point at."""

import gzip
import itertools
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

from specfleet.contracts.errors import DataError
from specfleet.data.conversation import Conversation, Rejects, RowRejected, parse_row
from specfleet.data.demo import resolve_builtin

_PARQUET_MAGIC = b"PAR1"
_GZIP_MAGIC = b"\x1f\x8b"
_PARQUET_BATCH_ROWS = 256


@dataclass
class Reading:
    """What was read so far; rows_read = conversations handed out + rejects.total()."""

    rows_read: int = 0
    rejects: Rejects = field(default_factory=Rejects)
    fields_seen: set[str] = field(default_factory=set)


def resolve_sources(sources: Sequence[str | Path]) -> list[Path]:
    """Paths of the files, built-in names resolved. Raises DataError SF-DATA-MISSING, SF-DATA-EMPTY."""
    if not sources:
        raise DataError("SF-DATA-MISSING", "no conversation file given: name at least one in data.train")
    paths = []
    for source in sources:
        path = Path(resolve_builtin(str(source))).expanduser()
        if not path.exists():
            raise DataError("SF-DATA-MISSING", f"conversation file {path} does not exist")
        if not path.is_file():
            raise DataError("SF-DATA-MISSING", f"{path} is a directory; name the conversation files in it")
        if path.stat().st_size == 0:
            raise DataError("SF-DATA-EMPTY", f"conversation file {path} is empty (0 bytes)")
        paths.append(path)
    return paths


def iter_conversations(
    paths: Sequence[Path],
    reading: Reading,
    keep: dict[str, list[str]],
    interleave: bool = False,
    to_answer: bool = False,
) -> Iterator[Conversation]:
    """Every usable row of every file; the others are counted in `reading.rejects`. to_answer: see `parse_row`.

    interleave takes one row of each file in turn, so that a limit on samples does not take all from the first file.
    Raises DataError SF-DATA-NOT-JSON (with the line), SF-DATA-NOT-PARQUET, SF-DATA-UNREADABLE, SF-DATA-EMPTY.
    """
    files = [_located(path) for path in paths]
    rows = _round_robin(files) if interleave else itertools.chain.from_iterable(files)
    for path, position, row in rows:
        reading.rows_read += 1
        if isinstance(row, dict):
            reading.fields_seen.update(row)
        where = f"{path.name}:{position}"
        try:
            conversation = parse_row(row, where, _stem(path), keep, to_answer)
        except RowRejected as rejected:
            reading.rejects.add(where, rejected)
            continue
        yield conversation


def iter_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """(line or row number from 1, parsed row) of one file, in constant memory for JSON Lines and Parquet."""
    with path.open("rb") as probe:
        magic = probe.read(4)
    if magic == _PARQUET_MAGIC:
        yield from _parquet_rows(path)
        return
    opener = gzip.open if magic.startswith(_GZIP_MAGIC) else open
    try:
        with opener(path, "rt", encoding="utf-8-sig") as text:
            yield from _json_rows(path, cast(IO[str], text))
    except (OSError, EOFError, zlib.error) as error:
        raise DataError("SF-DATA-UNREADABLE", f"{path} cannot be read: {error}") from error
    except UnicodeDecodeError as error:
        raise DataError("SF-DATA-UNREADABLE", f"{path} is not UTF-8 text: {error}") from error


def _json_rows(path: Path, text: IO[str]) -> Iterator[tuple[int, Any]]:
    """JSON Lines when the first line with text is a whole JSON object; otherwise one JSON document."""
    lines = ((number, line) for number, line in enumerate(text, 1) if line.strip())
    number, first = next(lines, (0, ""))
    if not first:
        raise DataError("SF-DATA-EMPTY", f"conversation file {path} holds no rows")
    pretty_printed = first.lstrip()[0] == "{" and ".jsonl" not in path.suffixes and not _is_json(first)
    if first.lstrip()[0] == "[" or pretty_printed:
        yield from _document_rows(path, "\n" * (number - 1) + first + text.read())
        return
    for position, line in itertools.chain([(number, first)], lines):
        yield position, _parse_line(path, position, line)


def _document_rows(path: Path, text: str) -> Iterator[tuple[int, Any]]:
    try:
        document = json.loads(text)
    except ValueError as error:
        raise DataError("SF-DATA-NOT-JSON", f"{path} is not JSON: {error}") from error
    if isinstance(document, dict):
        lists = [
            value for value in document.values() if isinstance(value, list) and value and isinstance(value[0], dict)
        ]
        is_row = "messages" in document or "conversations" in document
        document = [document] if is_row or len(lists) != 1 else lists[0]
    if not document:
        raise DataError("SF-DATA-EMPTY", f"conversation file {path} holds an empty list")
    yield from enumerate(document, 1)


def _parse_line(path: Path, number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        shown = line.strip()[:60]
        raise DataError(
            "SF-DATA-NOT-JSON",
            f"{path} line {number} is not JSON ({error}): {shown!r}. Each line must hold one JSON object",
        ) from error


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def _parquet_rows(path: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            batches = file.iter_batches(batch_size=_PARQUET_BATCH_ROWS)
            yield from enumerate((_without_nulls(row) for batch in batches for row in batch.to_pylist()), 1)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError("SF-DATA-NOT-PARQUET", f"{path} is not a readable Parquet file: {error}") from error


def _without_nulls(row: dict[str, Any]) -> dict[str, Any]:
    """Parquet gives every row every column of the file; a null there is an absent key here."""
    for name in ("messages", "conversations"):
        if isinstance(row.get(name), list):
            row[name] = [
                {k: v for k, v in item.items() if v is not None} if isinstance(item, dict) else item
                for item in row[name]
            ]
    return row


def _located(path: Path) -> Iterator[tuple[Path, int, Any]]:
    for position, row in iter_rows(path):
        yield path, position, row


def _round_robin(iterators: Iterable[Iterator[tuple[Path, int, Any]]]) -> Iterator[tuple[Path, int, Any]]:
    active = list(iterators)
    while active:
        for iterator in list(active):
            item = next(iterator, None)
            if item is None:
                active.remove(iterator)
            else:
                yield item


def _stem(path: Path) -> str:
    """Name of a source that the rows do not name: the file's, without its endings."""
    return path.name.split(".")[0]
