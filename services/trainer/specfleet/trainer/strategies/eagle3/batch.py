"""Stored features → one padded batch with the indices of every supervised row. CPU only, runs in the prefetch thread.

Shapes: B samples, T padded length, S rollout steps, U distinct teacher rows, R_i supervised rows of step i.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch.nn.utils.rnn import pad_sequence

MaskAlign = Literal["strict", "input", "compat"]


def supervised(loss_mask_BT: torch.Tensor, lengths_B: torch.Tensor, steps: int, align: MaskAlign) -> torch.Tensor:
    """[S, B, T] bool: does row t of rollout step i count in the loss?

    loss_mask: zero in padding. Row t of step i is fed x_{t+1+i} and judged by the teacher's prediction of x_{t+2+i}, so its
    teacher row t+1+i must exist in every mode. strict: all of x_{t+1} … x_{t+2+i} are supervised, which keeps rollouts inside
    one answer and trains the first situation met at inference. input: x_{t+1+i} is. compat: x_{t+i} is, the last token never
    (the rows other trainers use; kept for comparisons).
    """
    count, length = loss_mask_BT.shape
    mask = torch.zeros(count, length + steps + 2, dtype=torch.bool)
    mask[:, :length] = loss_mask_BT.bool()
    if align == "compat":
        mask[torch.arange(count), lengths_B - 1] = False
    result = torch.zeros(steps, count, length, dtype=torch.bool)
    run = mask[:, 1 : length + 1].clone()
    for step in range(steps):
        match align:
            case "strict":
                run &= mask[:, 2 + step : length + 2 + step]
                result[step] = run
            case "input":
                result[step] = mask[:, 1 + step : length + 1 + step]
            case "compat":
                result[step] = mask[:, step : length + step]
    teacher_row = torch.arange(length) + 1 + torch.arange(steps)[:, None]
    return result & (teacher_row[:, None] < lengths_B[:, None])


def collate(samples: Sequence[dict[str, torch.Tensor]], steps: int, align: MaskAlign) -> dict[str, torch.Tensor]:
    """One micro-batch.

    input_ids [B, T] int64 · aux_states [B, T, K·H] · teacher_states [U, H] (final states of rows some step is judged by) ·
    teacher_argmax [U], teacher_lse [U] (when captured) · rows [ΣR_i], teacher_of [ΣR_i], row_counts [S]: flat row b·T + t
    and teacher row of every supervised row, step after step · active, active_counts: rows each step must compute because it
    or a later step is supervised there · num_sequences, num_skipped: samples with and without a supervised row · num_tokens,
    num_loss_tokens (scalars).
    """
    lengths = [int(sample["input_ids"].shape[0]) for sample in samples]
    length = max(lengths)
    ids = pad_sequence([sample["input_ids"] for sample in samples], batch_first=True).long()
    aux = pad_sequence([sample["aux_states"] for sample in samples], batch_first=True)
    loss_mask = pad_sequence([sample["loss_mask"] for sample in samples], batch_first=True)
    masks = supervised(loss_mask, torch.tensor(lengths), steps, align)

    flat = masks.flatten(1)
    needed = flat.flip(0).cummax(0).values.flip(0) if steps else flat
    rows = [mask.nonzero().flatten() for mask in flat]
    active = [mask.nonzero().flatten() for mask in needed]
    # Row t of step i is judged by row t + 1 + i of the same sample; the flat index moves by the same amount.
    judges = torch.cat([index + 1 + step for step, index in enumerate(rows)])
    unique, teacher_of = torch.unique(judges, return_inverse=True)
    present = masks.any(0).any(1)
    batch = {
        "input_ids": ids,
        "aux_states": aux,
        "rows": torch.cat(rows),
        "teacher_of": teacher_of,
        "row_counts": torch.tensor([len(index) for index in rows]),
        "active": torch.cat(active),
        "active_counts": torch.tensor([len(index) for index in active]),
        "num_sequences": present.sum(),
        "num_skipped": (~present).sum(),
        "num_tokens": torch.tensor(sum(lengths)),
        "num_loss_tokens": loss_mask.sum(dtype=torch.int64),
    }
    batch["teacher_states"] = _select(samples, "final_state", lengths, length, unique)
    for name in ("teacher_argmax", "teacher_lse"):
        if name in samples[0]:
            batch[name] = _select(samples, name, lengths, length, unique)
    return batch


def _select(
    samples: Sequence[dict[str, torch.Tensor]], name: str, lengths: Sequence[int], padded: int, flat: torch.Tensor
) -> torch.Tensor:
    """Rows `flat` (b·T + t, ascending) of a feature, without padding it first."""
    bounds = torch.searchsorted(flat, torch.arange(len(lengths) + 1) * padded).tolist()
    parts = [
        sample[name][flat[bounds[index] : bounds[index + 1]] - index * padded] for index, sample in enumerate(samples)
    ]
    return torch.cat(parts)
