"""Stored features → one micro-batch of blocks, with the teacher's states. CPU only.

Blocks overlap, so many slots ask for the same teacher row. Supervised slots are sorted by the position of their teacher: a
chunk of them then needs a run of teacher rows, each computed once, and the teacher's logits never exist for a whole batch.
Shapes: R supervised slots, U distinct teacher positions.
"""

from collections.abc import Sequence

import torch

from specfleet.trainer.strategies.block_batch import BlockPlan, collate_blocks
from specfleet.trainer.strategies.corrected_batch import slot_weights


def collate(
    samples: Sequence[dict[str, torch.Tensor]], plan: BlockPlan, gamma: float | None
) -> dict[str, torch.Tensor]:
    """As `collate_blocks`, with rows [R] in the order of their teachers, and: weights [R] fp32 · denominator: fp32 scalar, their
    sum · teacher_states [U, H] · teacher_of [R]: row of teacher_states per row · row_bounds, teacher_bounds [C + 1]: where chunks
    begin in rows and in teacher_states.

    Slot k of the block at a predicts x_{a+k+1}; its teacher is the state at a + k.
    """
    batch = collate_blocks(samples, plan)
    slots = plan.block_size
    block, slot = batch["rows"] // slots, batch["rows"] % slots
    width = max(len(sample["input_ids"]) for sample in samples)
    place = batch["sample"][block] * width + batch["anchors"][block] + slot
    places_U, teacher_of, shared_U = place.unique(return_inverse=True, return_counts=True)
    order = teacher_of.argsort(stable=True)
    batch["rows"], batch["teacher_of"] = batch["rows"][order], teacher_of[order]
    per_sample = torch.bincount(places_U // width, minlength=len(samples)).tolist()
    positions = (places_U % width).split(per_sample)
    batch["teacher_states"] = torch.cat(
        [sample["final_state"][at] for sample, at in zip(samples, positions, strict=True)]
    )
    batch["row_bounds"], batch["teacher_bounds"] = chunk_bounds(shared_U, plan.chunk_blocks * slots)
    batch["weights"] = slot_weights(batch["rows"], plan, gamma)
    batch["denominator"] = batch["weights"].sum()
    return batch


def chunk_bounds(shared_U: torch.Tensor, chunk_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Chunks of about chunk_rows rows that never part the rows of one teacher: bounds in rows and in teachers, [C + 1] each.

    shared_U: rows per teacher, in order.
    """
    first_row = torch.cat((shared_U.new_zeros(1), shared_U.cumsum(0)))
    wanted = torch.arange(0, int(first_row[-1]) + chunk_rows, chunk_rows)
    teachers = torch.searchsorted(first_row, wanted).clamp_max(len(shared_U))
    return first_row[teachers], teachers
