"""Conversation files of every kind, and what is said about files that cannot be used."""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specfleet.contracts.errors import EXIT_BAD_INPUT, DataError
from specfleet.data.conversation import Conversation
from specfleet.data.sources import Reading, iter_conversations, resolve_sources

OPENAI = {
    "id": "o1",
    "source": "s1",
    "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
}
SHAREGPT = {"id": "s1", "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}


def read(
    *paths: Path, keep: dict[str, list[str]] | None = None, interleave: bool = False
) -> tuple[list[Conversation], Reading]:
    reading = Reading()
    return list(iter_conversations(resolve_sources(paths), reading, keep or {}, interleave)), reading


def lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def refused(*paths: Path) -> DataError:
    with pytest.raises(DataError) as caught:
        read(*paths)
    assert caught.value.exit_code == EXIT_BAD_INPUT
    return caught.value


def _write(path: Path, rows: list[dict[str, Any]], kind: str) -> Path:
    match kind:
        case "jsonl":
            path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
        case "json array":
            path.write_text("\n" + json.dumps(rows, indent=2))
        case "json object":
            path.write_text(json.dumps({"version": 1, "data": rows}, indent=2))
        case "jsonl.gz":
            path.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
        case "json.gz":
            path.write_bytes(gzip.compress(json.dumps(rows).encode()))
        case "bom":
            path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8-sig")
        case "parquet":
            pq.write_table(pa.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize("kind", ["jsonl", "json array", "json object", "jsonl.gz", "json.gz", "bom", "parquet"])
@pytest.mark.parametrize("shape", ["openai", "sharegpt"])
def test_every_file_kind_gives_the_same_conversations(tmp_path: Path, kind: str, shape: str) -> None:
    rows = [{**(OPENAI if shape == "openai" else SHAREGPT), "id": f"r{i}", "license": "MIT"} for i in range(3)]
    found, reading = read(_write(tmp_path / "chat.data", rows, kind))
    assert [c.id for c in found] == ["r0", "r1", "r2"]
    assert all(c.messages == OPENAI["messages"] and c.license == "MIT" for c in found)
    assert {c.source for c in found} == ({"s1"} if shape == "openai" else {"chat"})
    assert (reading.rows_read, reading.rejects.total()) == (3, 0)


def test_parquet_columns_that_are_null_are_absent(tmp_path: Path) -> None:
    calls = [{"role": "assistant", "content": "b", "tool_calls": "[]"}]
    rows = [OPENAI, {"id": "x", "messages": [*OPENAI["messages"], *calls], "response_token_ids": None}]  # type: ignore[misc]
    found, _ = read(_write(tmp_path / "chat.parquet", rows, "parquet"))
    assert found[0].messages == OPENAI["messages"]
    assert found[1].response_token_ids is None


def test_a_single_conversation_document(tmp_path: Path) -> None:
    (path := tmp_path / "one.json").write_text(json.dumps(OPENAI, indent=2))
    assert [c.id for c in read(path)[0]] == ["o1"]


def test_rows_are_counted_by_reason_with_the_first_as_example(tmp_path: Path) -> None:
    user_only = {"messages": [{"role": "user", "content": "a"}]}
    path = lines(
        tmp_path / "mixed.jsonl", OPENAI, [1], {"text": "a"}, {"messages": []}, {"messages": "a"}, user_only, user_only,
        {"messages": [{"role": "wizard", "content": "a"}]}, {"messages": [{"role": "user", "content": 3}]},
        {"messages": ["a"]}, {**OPENAI, "tools": 7}, {**OPENAI, "response_token_ids": "x"},
    )  # fmt: skip
    found, reading = read(path)
    assert len(found) == 1
    assert dict(reading.rejects.counts) == {
        "not_an_object": 1, "unknown_format": 3, "empty": 1, "no_assistant": 2, "unknown_role": 1, "bad_content": 1,
        "bad_tools": 1, "bad_token_ids": 1,
    }  # fmt: skip
    assert reading.rows_read == len(found) + reading.rejects.total() == 12
    assert reading.rejects.examples["unknown_role"] == "mixed.jsonl:8: role 'wizard'"
    assert "no_assistant 2 (first: mixed.jsonl:6" in reading.rejects.describe()


def test_filters_keep_only_rows_with_one_of_the_values(tmp_path: Path) -> None:
    rows = [{**OPENAI, "id": str(i), "split": split, "lang": "de"} for i, split in enumerate(["train", "dev", "train"])]
    found, reading = read(
        lines(tmp_path / "f.jsonl", *rows), keep={"split": ["train"], "lang": ["de", "fr"], "source": ["s1"]}
    )
    assert [c.id for c in found] == ["0", "2"]
    assert dict(reading.rejects.counts) == {"filtered": 1}


def test_interleaving_takes_rows_of_every_file_in_turn(tmp_path: Path) -> None:
    long = lines(tmp_path / "long.jsonl", *({**OPENAI, "id": f"l{i}"} for i in range(4)))
    short = lines(tmp_path / "short.jsonl", {**OPENAI, "id": "s0"})
    assert [c.id for c in read(long, short)[0]] == ["l0", "l1", "l2", "l3", "s0"]
    assert [c.id for c in read(long, short, interleave=True)[0]] == ["l0", "s0", "l1", "l2", "l3"]


def test_a_missing_file(tmp_path: Path) -> None:
    error = refused(tmp_path / "absent.jsonl")
    assert error.code == "SF-DATA-MISSING"
    assert "absent.jsonl" in error.message


def test_a_directory_instead_of_a_file(tmp_path: Path) -> None:
    assert "is a directory" in refused(tmp_path).message


def test_no_file_at_all() -> None:
    assert refused().code == "SF-DATA-MISSING"


@pytest.mark.parametrize(
    "content", ["", "\n \n", "[]", "{}"], ids=["no bytes", "blank lines", "empty list", "empty object"]
)
def test_files_without_rows(tmp_path: Path, content: str) -> None:
    (path := tmp_path / "x.json").write_text(content)
    if content == "{}":
        found, reading = read(path)
        assert (found, dict(reading.rejects.counts)) == ([], {"unknown_format": 1})
    else:
        assert refused(path).code == "SF-DATA-EMPTY"


def test_broken_json_lines_name_the_line(tmp_path: Path) -> None:
    (path := tmp_path / "x.jsonl").write_text(f"{json.dumps(OPENAI)}\n\n{{'messages': []}}\n")
    error = refused(path)
    assert error.code == "SF-DATA-NOT-JSON"
    assert "line 3" in error.message
    (path := tmp_path / "y.jsonl").write_text('{"messages": [')
    assert "line 1" in refused(path).message


def test_broken_json_documents_name_the_place(tmp_path: Path) -> None:
    (path := tmp_path / "x.json").write_text('\n[\n {"a": 1},\n oops\n]')
    error = refused(path)
    assert error.code == "SF-DATA-NOT-JSON"
    assert "line 4" in error.message


def test_text_that_is_not_json_at_all(tmp_path: Path) -> None:
    (path := tmp_path / "x.txt").write_text("User: hello")
    assert refused(path).code == "SF-DATA-NOT-JSON"


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"\xff\xfe\x00broken", "SF-DATA-UNREADABLE"),
        (b"PAR1 but not really", "SF-DATA-NOT-PARQUET"),
        (gzip.compress(b'{"messages": []}\n' * 1000)[:40], "SF-DATA-UNREADABLE"),
        (b"\x1f\x8b\x08garbage-garbage", "SF-DATA-UNREADABLE"),
    ],
    ids=["not utf-8", "not parquet", "cut gzip", "not gzip"],
)
def test_unreadable_bytes(tmp_path: Path, content: bytes, code: str) -> None:
    (path := tmp_path / "x.bin").write_bytes(content)
    assert refused(path).code == code
