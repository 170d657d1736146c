"""Which held-out rows are measured, and how differences between two decodings are told."""

from pathlib import Path

import pytest
from fixtures.gate_case import write_eval_set

from specfleet.contracts.errors import DataError
from specfleet.data.prompt_set import PromptSet, PromptSetWriter
from specfleet.drafts.acceptance import TextRow
from specfleet.gate.lossless import Decoded, lossless_report, shortest
from specfleet.gate.rows import EvalRow, batches_of, repeated_share, select_rows


def _row(index: int, source: str, prompt_tokens: int, length: int = 40) -> EvalRow:
    return EvalRow(f"r{index}", source, "stop", TextRow(list(range(length)), prompt_tokens), False)


def test_rows_per_source_and_finish(tiny_target: Path, tmp_path: Path) -> None:
    ids = [[index + 3] * 12 + [7, 8, 9, 10, 11, 12] for index in range(10)]
    prompts = PromptSet.open(write_eval_set(tmp_path / "set", tiny_target, ids))
    rows = select_rows(prompts, 3)
    assert [row.id for row in rows] == ["row-0", "row-2", "row-4", "row-1", "row-3", "row-5"]
    assert [row.finished for row in rows] == [True, False, True, True, False, True]
    assert len(select_rows(prompts, 0)) == 10


def test_only_the_first_answer_counts(tmp_path: Path) -> None:
    writer = PromptSetWriter(tmp_path)
    masks = {"two turns": b"\0\0\1\1\1\0\0\1\1", "no prompt": b"\1\1\1", "one token": b"\0\0\1", "no answer": b"\0\0"}
    for name, mask in masks.items():
        writer.add(
            {
                "id": name, "source": "s", "split": "eval", "finish": "stop", "license": "", "loss_mask": mask,
                "input_ids": list(range(len(mask))), "num_tokens": len(mask), "num_loss_tokens": mask.count(1),
                "prompt_tokens": mask.find(1) if 1 in mask else len(mask), "flags": [],
            }
        )  # fmt: skip
    writer.finish({})
    [row] = select_rows(PromptSet.open(tmp_path), 0)
    assert row.text == TextRow([0, 1, 2, 3, 4], 2)


def test_a_set_without_answers_is_refused(tmp_path: Path) -> None:
    PromptSetWriter(tmp_path).finish({})
    with pytest.raises(DataError) as error:
        select_rows(PromptSet.open(tmp_path), 0)
    assert error.value.code == "SF-GATE-NO-ROWS"


def test_loops_are_told_by_repeated_four_grams() -> None:
    assert repeated_share([1, 2, 3, 4, 5, 6, 7, 8]) == 0.0
    assert repeated_share([1, 2] * 20) > 0.9
    assert repeated_share([1, 2]) == 0.0


def test_batches_cover_every_row_once_within_the_limit() -> None:
    rows = [_row(i, "s", 2, length) for i, length in enumerate((5, 50, 6, 48, 200))]
    batches = list(batches_of(rows, 100))
    assert sorted(i for batch in batches for i in batch) == [0, 1, 2, 3, 4]
    assert batches == [[0, 2], [3, 1], [4]]


def test_shortest_prompts_of_every_source() -> None:
    rows = [_row(0, "b", 9), _row(1, "a", 5), _row(2, "a", 3), _row(3, "a", 4), _row(4, "b", 8)]
    assert [row.id for row in shortest(rows, 2)] == ["r2", "r3", "r4", "r0"]
    assert shortest(rows, 0) == []


def test_the_first_difference_is_named() -> None:
    same = Decoded(_row(0, "s", 2), [1, 2, 3], [1, 2, 3], 2.0, None)
    other = Decoded(_row(1, "s", 2), [1, 2, 3], [1, 5, 3], 1.0, 0.5)
    short = Decoded(_row(2, "s", 2), [1, 2, 3], [1, 2], 1.0, 0.1)
    assert [item.first_difference for item in (same, other, short)] == [None, 1, 2]
    report = lossless_report([same, other])
    assert report["identical"] is False
    assert report["tokens"] == 6
    assert lossless_report([same])["identical"] is True
