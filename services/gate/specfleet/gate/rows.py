"""Held-out rows: which are measured, and which of them flatter every drafter."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from specfleet.contracts.errors import DataError
from specfleet.data.prompt_set import Prompt, PromptSet
from specfleet.drafts.acceptance import TextRow

# Share of repeated 4-grams above which an answer is usually a loop.
LOOP_SHARE = 0.4


@dataclass(frozen=True)
class EvalRow:
    id: str
    source: str
    finish: str
    text: TextRow
    loops: bool

    @property
    def finished(self) -> bool:
        """The target ended the answer itself; one cut by a limit may be a loop."""
        return self.finish == "stop"


def select_rows(prompts: PromptSet, max_rows_per_source: int) -> list[EvalRow]:
    """The first rows of every source (all: 0), in prompt order. Raises DataError SF-GATE-NO-ROWS when none is usable."""
    taken: dict[str, list[EvalRow]] = defaultdict(list)
    for batch in prompts.iter_batches(256):
        for prompt in batch:
            rows = taken[prompt.source]
            if (not max_rows_per_source or len(rows) < max_rows_per_source) and (row := _row(prompt)) is not None:
                rows.append(row)
    rows = [row for source in sorted(taken) for row in taken[source]]
    if not rows:
        raise DataError(
            "SF-GATE-NO-ROWS", f"{prompts.path} holds {len(prompts)} rows, none with a prompt and an answer"
        )
    return rows


def _row(prompt: Prompt) -> EvalRow | None:
    """The prompt and its first answer: later turns hold text that the target did not write."""
    start = prompt.prompt_tokens
    end = prompt.loss_mask.find(b"\0", start)
    ids = prompt.input_ids[: end if end >= 0 else len(prompt.input_ids)]
    # An answer of one token has nothing to speculate about.
    if start < 1 or len(ids) < start + 2:
        return None
    loops = repeated_share(ids[start:]) > LOOP_SHARE
    return EvalRow(prompt.id, prompt.source or "unnamed", prompt.finish, TextRow(ids, start), loops)


def repeated_share(ids: Sequence[int], size: int = 4) -> float:
    """Share of n-grams that occurred before, 0..1."""
    grams = [tuple(ids[i : i + size]) for i in range(len(ids) - size + 1)]
    return 1.0 - len(set(grams)) / len(grams) if grams else 0.0


def batches_of(rows: Sequence[EvalRow], max_batch_tokens: int) -> Iterator[list[int]]:
    """Indices of rows of similar length; rows × longest ≤ max_batch_tokens unless one row is longer."""
    batch: list[int] = []
    for index in sorted(range(len(rows)), key=lambda i: len(rows[i].text.input_ids)):
        if batch and (len(batch) + 1) * len(rows[index].text.input_ids) > max_batch_tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch
