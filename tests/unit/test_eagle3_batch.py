"""Which rows are supervised, and that a padded batch points at the right tokens and teacher rows."""

import pytest
import torch

from specfleet.trainer.strategies.eagle3.batch import MaskAlign, collate, supervised


def _live(mask: list[int], steps: int, align: MaskAlign, step: int) -> set[int]:
    return set(
        supervised(torch.tensor([mask]), torch.tensor([len(mask)]), steps, align)[step, 0].nonzero().flatten().tolist()
    )


@pytest.mark.parametrize(("align", "expected"), [("compat", {2, 3, 4}), ("input", {1, 2, 3, 4}), ("strict", {1, 2, 3})])
def test_first_step_rows(align: MaskAlign, expected: set[int]) -> None:
    assert _live([0, 0, 1, 1, 1, 1], 1, align, 0) == expected


def test_shift_table() -> None:
    """n = 6, step 1, row 2: compat looks at m_3, input at m_4, strict at m_4 and m_5 (and at every token before)."""
    ones = [1] * 6
    for align, deciding in (("compat", [3]), ("input", [4]), ("strict", [3, 4, 5])):
        assert 2 in _live(ones, 2, align, 1)
        for position in range(6):
            mask = [int(i != position) for i in range(6)]
            assert (2 in _live(mask, 2, align, 1)) == (position not in deciding), (align, position)


def test_every_mode_demands_that_the_teacher_row_exists() -> None:
    for align in ("compat", "input", "strict"):
        masks = supervised(torch.ones(1, 9), torch.tensor([9]), 7, align)[:, 0]
        for step in range(7):
            assert all(row + 1 + step <= 8 for row in masks[step].nonzero().flatten().tolist())


def test_strict_rollouts_stay_inside_one_answer() -> None:
    mask = [0, 1, 1, 1, 0, 0, 1, 1, 1, 1]
    assert _live(mask, 3, "strict", 0) == {0, 1, 5, 6, 7}
    assert _live(mask, 3, "strict", 1) == {0, 5, 6}
    assert _live(mask, 3, "strict", 2) == {5}


def test_short_texts_have_no_rows() -> None:
    for length in (1, 2):
        assert not supervised(torch.ones(1, length), torch.tensor([length]), 7, "strict").any()


def test_collate_points_at_tokens_and_teacher_rows() -> None:
    lengths = [7, 5]
    samples = [
        {
            "input_ids": torch.arange(n, dtype=torch.int32) + 10 * index,
            "loss_mask": torch.ones(n, dtype=torch.uint8),
            "aux_states": torch.full((n, 3), float(index)),
            # Each state names its own sample and position.
            "final_state": torch.tensor([[index, t] for t in range(n)], dtype=torch.float32),
            "teacher_argmax": torch.arange(n, dtype=torch.int32) + 100 * index,
        }
        for index, n in enumerate(lengths)
    ]
    batch = collate(samples, 3, "strict")
    counts = batch["row_counts"].tolist()
    assert counts == [5 + 3, 4 + 2, 3 + 1]
    states, argmax = batch["teacher_states"], batch["teacher_argmax"]
    parts = zip(batch["rows"].split(counts), batch["teacher_of"].split(counts), strict=True)
    for step, (rows, judges) in enumerate(parts):
        for row, judge in zip(rows.tolist(), judges.tolist(), strict=True):
            sample, t = divmod(row, max(lengths))
            assert states[judge].tolist() == [sample, t + 1 + step]
            assert argmax[judge] == 100 * sample + t + 1 + step
    assert batch["num_tokens"] == 12
    assert batch["num_loss_tokens"] == 12


def test_active_rows_cover_later_steps() -> None:
    """compat supervises rows at step i that it did not supervise before; their features must exist all the same."""
    samples = [
        {
            "input_ids": torch.zeros(10, dtype=torch.int32),
            "loss_mask": torch.tensor([0, 0, 0, 0, 1, 1, 0, 1, 0, 0], dtype=torch.uint8),
            "aux_states": torch.zeros(10, 3),
            "final_state": torch.zeros(10, 2),
        }
    ]
    batch = collate(samples, 3, "compat")
    active = [set(part.tolist()) for part in batch["active"].split(batch["active_counts"].tolist())]
    rows = [set(part.tolist()) for part in batch["rows"].split(batch["row_counts"].tolist())]
    assert active[2] == rows[2]
    assert active[1] == rows[1] | rows[2]
    assert active[0] == rows[0] | rows[1] | rows[2]
