"""Acceptance per source: every draft on the same rows, from one target pass per row."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from specfleet.contracts.errors import CaptureItemError
from specfleet.drafts.acceptance import Acceptance, ngram_acceptance, offline_acceptance, total_acceptance
from specfleet.drafts.base import Draft
from specfleet.gate.rows import EvalRow, batches_of
from specfleet.target.dtypes import DTYPES, compute_dtype
from specfleet.target.hf import HFTarget

# Tokens with padding in one prefill: bounds the hidden states held at once.
BATCH_TOKENS = 4096

Counts = dict[str, list[Acceptance]]


class OncePerBatch:
    """A target that runs each batch once, however many drafts look at it."""

    def __init__(self, target: HFTarget) -> None:
        self._target = target
        self._batch: list[list[int]] = []
        self._result: list[dict[str, torch.Tensor] | CaptureItemError] = []

    @property
    def embedding_VH(self) -> torch.Tensor:
        return self._target.embedding_VH

    @property
    def head_VH(self) -> torch.Tensor:
        return self._target.head_VH

    def capture(self, batch: Sequence[Sequence[int]]) -> list[dict[str, torch.Tensor] | CaptureItemError]:
        asked = [list(ids) for ids in batch]
        if asked != self._batch:
            self._batch, self._result = asked, self._target.capture(asked)
        return self._result


def measure(
    rows: Sequence[EvalRow],
    drafts: dict[str, Draft],
    target_dir: Path,
    dtype: str,
    depth: int,
    device: str,
    progress: Callable[[int], None],
) -> Counts:
    """Name → acceptance per row, in the order of rows. All drafts read the same layers."""
    layers = next(iter(drafts.values())).config.layer_ids
    target = HFTarget.load(target_dir, layers, dtype, device, final_state="none")
    once = cast(HFTarget, OncePerBatch(target))  # the three members that offline_acceptance uses
    placed = {name: draft.to(device, compute_dtype(DTYPES[dtype], device)) for name, draft in drafts.items()}
    counts: Counts = {name: [Acceptance()] * len(rows) for name in drafts}
    done = 0
    for batch in batches_of(rows, BATCH_TOKENS):
        texts = [rows[index].text for index in batch]
        tokens = len(texts) * max(len(text.input_ids) for text in texts)
        for name, draft in placed.items():
            for index, acceptance in zip(batch, offline_acceptance(texts, once, draft, depth, tokens), strict=True):
                counts[name][index] = acceptance
        done += len(batch)
        progress(done)
    return counts


def ngram_table(rows: Sequence[EvalRow], depth: int) -> list[Acceptance]:
    return ngram_acceptance([row.text for row in rows], depth)


def source_table(rows: Sequence[EvalRow], counts: Counts) -> dict[str, dict[str, Any]]:
    """Source → before, after, n-gram, each over all rows and over finished rows; null where there is nothing to measure."""
    table = {}
    for source in sorted({row.source for row in rows}):
        every = [index for index, row in enumerate(rows) if row.source == source]
        finished = [index for index in every if rows[index].finished]
        after = _total(counts, "after", every)
        table[source] = {
            "before": _length(counts, "before", every),
            "before_stop_rows": _length(counts, "before", finished),
            "after": _length(counts, "after", every),
            "after_stop_rows": _length(counts, "after", finished),
            "ngram": _length(counts, "ngram", every),
            "ngram_stop_rows": _length(counts, "ngram", finished),
            "rows": len(every),
            "stop_rows": len(finished),
            "looping_rows": sum(rows[index].loops for index in every),
            "tokens": after.committed,
            "per_position": [round(share, 4) for share in after.by_position],
        }
    return table


def _length(counts: Counts, name: str, indices: Sequence[int]) -> float | None:
    return round(_total(counts, name, indices).length, 4) if indices and name in counts else None


def _total(counts: Counts, name: str, indices: Sequence[int]) -> Acceptance:
    return total_acceptance([counts[name][index] for index in indices])
