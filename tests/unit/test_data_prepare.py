"""Preparing prompt sets: conservation, limits, content addressing, damage, and what the coordinator reads."""

import hashlib
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fixtures.tiny import make_tiny_tokenizer

from specfleet.config.models import DataSection
from specfleet.contracts.errors import EXIT_BAD_INPUT, DataError
from specfleet.data import prompt_set as prompt_set_module
from specfleet.data.prepare import PrepareOptions, prepare_prompt_set
from specfleet.data.prompt_set import PromptSet
from specfleet.data.stats import summarize
from specfleet.data.vocab import count_loss_tokens


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tokenizer and a config, but no weights: rendering needs none."""
    directory = tmp_path_factory.mktemp("target")
    make_tiny_tokenizer().save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps({"vocab_size": 384, "eos_token_id": 2}))
    return directory


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECFLEET_CACHE", str(tmp_path / "cache"))


def conversation(i: int, answer: str = "The answer is 42.", **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"question {i}"}, {"role": "assistant", "content": answer}]
    return {
        "id": f"c{i}",
        "source": f"s{i % 2}",
        "split": "train",
        "finish": "stop",
        "license": "MIT",
        "messages": messages,
        **fields,
    }


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_in_equals_kept_plus_rejected(tmp_path: Path, target: Path) -> None:
    rows = [conversation(i) for i in range(5)]
    rows += [
        conversation(5, ""),
        {"messages": []},
        conversation(7, "x" * 50, split="dev"),
        conversation(8, "a<|im_end|>b"),
    ]
    rows.append({"messages": [{"role": "user", "content": "word " * 200}, {"role": "assistant", "content": "late"}]})
    options = PrepareOptions(max_length=64, keep={"split": ["train", ""]})
    found = prepare_prompt_set([write(tmp_path / "a.jsonl", rows)], target, tmp_path / "sets", options)
    summary = summarize(found)
    assert summary.rejects == {
        "empty": 1, "empty_answer": 1, "filtered": 1, "stop_token_in_answer": 1, "truncated_before_answer": 1,
    }  # fmt: skip
    assert summary.rows_read == len(rows) == summary.rows + sum(summary.rejects.values())
    assert summary.rows == len(found) == 5
    assert summary.tokens == sum(found.num_tokens_of(i) for i in range(5))
    even = found.read([0, 2, 4])
    assert summary.sources["s0"] == {
        "rows": 3,
        "tokens": sum(len(p.input_ids) for p in even),
        "loss_tokens": sum(p.num_loss_tokens for p in even),
    }
    assert (summary.finish, summary.licenses) == ({"stop": 5}, {"MIT": 5})
    assert summary.reject_examples["empty"] == "a.jsonl:7"


def test_rows_come_back_as_they_were_rendered(tmp_path: Path, target: Path) -> None:
    rows = [conversation(0), conversation(1, prompt_token_ids=[1, 5], response_token_ids=[9, 10, 2])]
    found = prepare_prompt_set([write(tmp_path / "a.jsonl", rows)], target, tmp_path / "sets")
    first, second = found.read([0, 1])
    tokenizer = make_tiny_tokenizer()
    text = "<|im_start|>user\nquestion 0<|im_end|>\n<|im_start|>assistant\nThe answer is 42.<|im_end|>"
    assert first.input_ids == tokenizer.encode(text, add_special_tokens=False)
    assert len(first.loss_mask) == len(first.input_ids) == found.num_tokens_of(0)
    assert first.loss_mask == bytes(first.prompt_tokens) + b"\1" * first.num_loss_tokens
    assert (first.id, first.source, first.split, first.finish, first.license, first.flags) == (
        "c0",
        "s0",
        "train",
        "stop",
        "MIT",
        (),
    )
    assert (second.input_ids, second.loss_mask, second.prompt_tokens) == ([1, 5, 9, 10, 2], b"\0\0\1\1\1", 2)
    assert second.flags == ("from_token_ids",)


def test_max_samples_takes_from_every_file(tmp_path: Path, target: Path) -> None:
    files = [write(tmp_path / f"{name}.jsonl", [conversation(i, id=f"{name}{i}") for i in range(9)]) for name in "ab"]
    found = prepare_prompt_set(files, target, tmp_path / "sets", PrepareOptions(max_samples=4))
    assert [p.id for p in found.read(range(4))] == ["a0", "b0", "a1", "b1"]
    assert found.manifest["counts"]["rows_read"] == 4


def test_max_samples_counts_kept_rows(tmp_path: Path, target: Path) -> None:
    rows = [conversation(i, "" if i < 3 else "fine") for i in range(9)]
    found = prepare_prompt_set(
        [write(tmp_path / "a.jsonl", rows)], target, tmp_path / "sets", PrepareOptions(max_samples=4)
    )
    assert [p.id for p in found.read(range(4))] == ["c3", "c4", "c5", "c6"]
    assert (found.manifest["counts"]["rows_read"], found.manifest["rejects"]) == (7, {"empty_answer": 3})


def test_options_of_a_run_configuration() -> None:
    section = DataSection(max_length=100, max_response_tokens=7, max_samples=3, filter={"split": ["train"]})
    assert PrepareOptions.from_section(section) == PrepareOptions(100, 7, 3, {"split": ["train"]})


def test_preparing_again_reuses_and_any_change_makes_a_new_set(tmp_path: Path, target: Path) -> None:
    source, out = write(tmp_path / "a.jsonl", [conversation(i) for i in range(3)]), tmp_path / "sets"
    first = prepare_prompt_set([source], target, out)
    before = (first.path / "manifest.json").stat().st_mtime_ns
    again = prepare_prompt_set([source], target, out)
    assert (again.path, again.digest) == (first.path, first.digest)
    assert (first.path / "manifest.json").stat().st_mtime_ns == before
    other_options = prepare_prompt_set([source], target, out, PrepareOptions(max_length=99))
    write(source, [conversation(i) for i in range(4)])
    other_rows = prepare_prompt_set([source], target, out)
    assert len({first.path, other_options.path, other_rows.path}) == 3


def test_a_changed_template_makes_a_new_set(tmp_path: Path, target: Path) -> None:
    source, out = write(tmp_path / "a.jsonl", [conversation(0)]), tmp_path / "sets"
    changed = tmp_path / "changed"
    make_tiny_tokenizer(chat_template=str(make_tiny_tokenizer().chat_template) + " ").save_pretrained(changed)
    (changed / "config.json").write_text((target / "config.json").read_text())
    first, second = (prepare_prompt_set([source], t, out) for t in (target, changed))
    assert first.path != second.path
    assert first.manifest["template_hash"] != second.manifest["template_hash"]


def test_the_digest_does_not_depend_on_machine_or_folder(tmp_path: Path, target: Path) -> None:
    digests = []
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
        source = write(tmp_path / name / "a.jsonl", [conversation(i) for i in range(3)])
        digests.append(prepare_prompt_set([source], target, tmp_path / name / "sets").digest)
    assert (
        digests[0]
        == digests[1]
        == hashlib.sha256(next((tmp_path / "x").glob("sets/p*/manifest.json")).read_bytes()).hexdigest()
    )


def test_nothing_is_left_behind_by_a_failure(tmp_path: Path, target: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text(json.dumps(conversation(0)) + "\nnot json\n")
    with pytest.raises(DataError, match="SF-DATA-NOT-JSON"):
        prepare_prompt_set([source], target, tmp_path / "sets")
    assert [p.name for p in (tmp_path / "sets").iterdir() if p.is_dir()] == []


def test_the_leftovers_of_a_killed_process_do_not_matter(tmp_path: Path, target: Path) -> None:
    source, out = write(tmp_path / "a.jsonl", [conversation(0)]), tmp_path / "sets"
    name = prepare_prompt_set([source], target, tmp_path / "elsewhere").path.name
    (partial := out / f".{name}.partial").mkdir(parents=True)
    (partial / "shard-00000.parquet").write_bytes(b"half")
    assert len(prepare_prompt_set([source], target, out)) == 1
    assert not partial.exists()


def test_a_damaged_set_is_prepared_again(tmp_path: Path, target: Path) -> None:
    source, out = write(tmp_path / "a.jsonl", [conversation(0)]), tmp_path / "sets"
    first = prepare_prompt_set([source], target, out)
    shard = first.path / "shard-00000.parquet"
    shard.write_bytes(shard.read_bytes()[:-1])
    again = prepare_prompt_set([source], target, out)
    assert (again.digest, again.path) == (first.digest, first.path)
    assert len(list(out.glob(".*.damaged-*"))) == 1


def test_two_preparers_at_once_make_one_set(tmp_path: Path, target: Path) -> None:
    # The lock belongs to an open file, so two threads contend for it as two processes do.
    source = write(tmp_path / "a.jsonl", [conversation(i) for i in range(50)])
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(prepare_prompt_set, [source], target, tmp_path / "sets") for _ in range(2)]
        first, second = (future.result() for future in futures)
    assert (first.path, first.digest) == (second.path, second.digest)
    assert [p for p in (tmp_path / "sets").iterdir() if p.is_dir()] == [first.path]


def test_reading_over_shards_and_groups(tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_set_module, "ROWS_PER_GROUP", 4)
    monkeypatch.setattr(prompt_set_module, "ROWS_PER_SHARD", 8)
    # Two groups at most are kept, so reads in random order evict and decode again.
    monkeypatch.setattr(prompt_set_module, "_CACHE_BYTES", 1)
    rows = [conversation(i, "word " * (1 + i % 5)) for i in range(30)]
    found = prepare_prompt_set([write(tmp_path / "a.jsonl", rows)], target, tmp_path / "sets")
    assert [shard["rows"] for shard in found.manifest["shards"]] == [8, 8, 8, 6]
    order = np.random.default_rng(0).permutation(30).tolist()
    assert [p.id for p in found.read(order)] == [f"c{i}" for i in order]
    assert [p.index for p in found.read(order)] == order
    batches = list(found.iter_batches(7))
    assert [len(batch) for batch in batches] == [7, 7, 7, 7, 2]
    assert [len(p.input_ids) for batch in batches for p in batch] == found.num_tokens.tolist()
    assert len(found._groups) == 1
    found.close()


def test_vocabulary_counts_are_those_of_supervised_tokens(tmp_path: Path, target: Path) -> None:
    found = prepare_prompt_set(
        [write(tmp_path / "a.jsonl", [conversation(i) for i in range(300)])], target, tmp_path / "sets"
    )
    expected = np.zeros(384, dtype=np.int64)
    for (prompt,) in found.iter_batches(1):
        for token, supervised in zip(prompt.input_ids, prompt.loss_mask, strict=True):
            expected[token] += supervised
    assert count_loss_tokens(found, 384).tolist() == expected.tolist()
    with pytest.raises(DataError, match="SF-DATA-VOCAB-ID"):
        count_loss_tokens(found, 50)


def refused(call: Any, code: str) -> str:
    with pytest.raises(DataError) as caught:
        call()
    assert (caught.value.code, caught.value.exit_code) == (code, EXIT_BAD_INPUT)
    return caught.value.message


def test_nothing_left_lists_every_reason(tmp_path: Path, target: Path) -> None:
    source = write(tmp_path / "a.jsonl", [conversation(0, ""), conversation(1, ""), {"messages": []}])
    message = refused(lambda: prepare_prompt_set([source], target, tmp_path / "sets"), "SF-DATA-NO-ROWS")
    assert "none of 3 rows" in message
    assert "empty_answer 2 (first: a.jsonl:1)" in message
    assert "empty 1 (first: a.jsonl:3)" in message


def test_a_filter_on_a_field_that_no_row_has_is_named(tmp_path: Path, target: Path) -> None:
    source = write(tmp_path / "a.jsonl", [conversation(0)])
    options = PrepareOptions(keep={"splitt": ["train"]})
    message = refused(lambda: prepare_prompt_set([source], target, tmp_path / "sets", options), "SF-DATA-NO-ROWS")
    assert "No row has the filter's field splitt" in message


def test_no_template_names_the_fix(tmp_path: Path) -> None:
    make_tiny_tokenizer(chat_template=None).save_pretrained(tmp_path / "t")
    (tmp_path / "t" / "config.json").write_text('{"vocab_size": 384}')
    source = write(tmp_path / "a.jsonl", [conversation(0)])
    message = refused(lambda: prepare_prompt_set([source], tmp_path / "t", tmp_path / "sets"), "SF-DATA-NO-TEMPLATE")
    assert "chat_template.jinja" in message


def test_a_broken_tokenizer(tmp_path: Path, target: Path) -> None:
    (broken := tmp_path / "t").mkdir()
    (broken / "config.json").write_text((target / "config.json").read_text())
    (broken / "tokenizer.json").write_text("{}")
    source = write(tmp_path / "a.jsonl", [conversation(0)])
    refused(lambda: prepare_prompt_set([source], broken, tmp_path / "sets"), "SF-DATA-TOKENIZER")


def test_opening_what_is_not_a_prompt_set(tmp_path: Path, target: Path) -> None:
    assert "does not exist" in refused(lambda: PromptSet.open(tmp_path), "SF-DATA-PROMPT-SET")
    for text in ("[]", "{}", '{"format": 1, "shards": [{}]}', '{"format": 1, "shards": 3}'):
        (tmp_path / "manifest.json").write_text(text)
        assert "cannot be read" in refused(lambda: PromptSet.open(tmp_path), "SF-DATA-PROMPT-SET")
    (tmp_path / "manifest.json").write_text('{"format": 99, "shards": []}')
    assert "format is 99" in refused(lambda: PromptSet.open(tmp_path), "SF-DATA-PROMPT-SET")


def test_shards_are_compared_with_the_manifest(tmp_path: Path, target: Path) -> None:
    found = prepare_prompt_set([write(tmp_path / "a.jsonl", [conversation(0)])], target, tmp_path / "sets")
    shard = found.path / "shard-00000.parquet"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    assert "sha256" in refused(lambda: PromptSet.open(found.path), "SF-DATA-PROMPT-SET")
    # Asked not to verify, only sizes are compared.
    assert len(PromptSet.open(found.path, verify=False)) == 1
    shard.unlink()
    assert "has 0 bytes" in refused(lambda: PromptSet.open(found.path, verify=False), "SF-DATA-PROMPT-SET")


@pytest.mark.parametrize("index", [-1, 1])
def test_an_index_out_of_range(tmp_path: Path, target: Path, index: int) -> None:
    found = prepare_prompt_set([write(tmp_path / "a.jsonl", [conversation(0)])], target, tmp_path / "sets")
    refused(lambda: found.read([index]), "SF-DATA-INDEX")
    refused(lambda: found.num_tokens_of(index), "SF-DATA-INDEX")


def test_reading_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, specfleet.data.prompt_set, specfleet.data.vocab, specfleet.data.sources, specfleet.data.stats, "
        "specfleet.data.prepare, specfleet.data.demo, specfleet.target.facts, specfleet.target.smollm2\n"
        "print(sorted({'torch', 'transformers', 'tokenizers', 'jinja2'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
