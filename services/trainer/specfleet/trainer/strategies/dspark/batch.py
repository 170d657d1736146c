"""Stored features → one micro-batch of blocks, with the teacher's states. CPU only.

Blocks overlap, so many slots ask for the same teacher row. Supervised slots are sorted by the position of their teacher: a
chunk of them then needs a run of teacher rows, each computed once, and the teacher's logits never exist for a whole batch.
Shapes: R supervised slots, U distinct teacher positions.
"""

from collections.abc import Sequence

import torch

from specfleet.trainer.strategies.block_batch import BlockPlan, collate_blocks, new_states, slot_weights


def collate(
    samples: Sequence[dict[str, torch.Tensor]], plan: BlockPlan, gamma: float | None
) -> dict[str, torch.Tensor]:
    """As `collate_blocks`, with rows [R] in the order of their teachers, and: weights [R] fp32 · denominator: fp32 scalar, their
    sum · teacher_states [U, H] · teacher_of [R]: row of teacher_states per row · row_bounds, teacher_bounds [C + 1]: where chunks
    begin in rows and in teacher_states.

    Slot k of the block at a predicts x_{a+k+1}; its teacher is the state at a + k.
    """
    batch = collate_blocks(samples, plan)
    width = max(len(sample["input_ids"]) for sample in samples)
    place_N = batch["sample"] * width + batch["anchors"]
    batch["rows"], shared = by_teacher(batch["rows"], place_N, plan.block_size, len(samples) * width)
    owner, positions = shared.view(len(samples), width).nonzero(as_tuple=True)
    shared_U = shared[shared > 0]
    batch["teacher_of"] = torch.arange(len(shared_U)).repeat_interleave(shared_U)
    batch["teacher_states"] = new_states(len(shared_U), samples[0]["final_state"], plan)
    counts = torch.bincount(owner, minlength=len(samples)).tolist()
    for sample, at, rows in zip(samples, positions.split(counts), batch["teacher_states"].split(counts), strict=True):
        torch.index_select(sample["final_state"], 0, at, out=rows)
    batch["row_bounds"], batch["teacher_bounds"] = chunk_bounds(shared_U, plan.chunk_blocks * plan.block_size)
    batch["weights"] = slot_weights(batch, plan, gamma)
    batch["denominator"] = batch["weights"].sum()
    return batch


def by_teacher(
    rows_R: torch.Tensor, place_N: torch.Tensor, block_size: int, num_places: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows in the order of their teachers and then of their blocks [R], rows per place [num_places]).

    place_N: where blocks are anchored; slot k's teacher is k places on. Sorted by counting: no two slots of the same number
    share a teacher, and of those that share one the earlier block's has the larger number.
    """
    slots = torch.arange(block_size)
    cells = (place_N[:, None] + slots) * block_size + slots.flip(0)
    table = rows_R.new_full((num_places * block_size,), -1)
    table.scatter_(0, cells.flatten().index_select(0, rows_R), rows_R)
    taken = table >= 0
    return table.masked_select(taken), taken.view(num_places, block_size).sum(1)


def chunk_bounds(shared_U: torch.Tensor, chunk_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Chunks of about chunk_rows rows that never part the rows of one teacher: bounds in rows and in teachers, [C + 1] each.

    shared_U: rows per teacher, in order.
    """
    first_row = torch.cat((shared_U.new_zeros(1), shared_U.cumsum(0)))
    wanted = torch.arange(0, int(first_row[-1]) + chunk_rows, chunk_rows)
    teachers = torch.searchsorted(first_row, wanted).clamp_max(len(shared_U))
    return first_row[teachers], teachers
