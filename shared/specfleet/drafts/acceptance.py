"""Acceptance of a draft on text the target wrote greedily, without running the target again for every round.

On such text a chain is verified against the text itself, so walking it round by round gives exactly what `decode_greedy`
would have accepted. One target prefill per row supplies the hidden states. The average is over rounds, as in serving: an
average over all starting positions would be another, length-biased number.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from specfleet.contracts.errors import CaptureItemError, DataError
from specfleet.drafts.base import Draft, Drafter
from specfleet.drafts.ngram import NgramDrafter
from specfleet.target.hf import HFTarget


@dataclass(frozen=True)
class TextRow:
    """input_ids = prompt, then the target's greedy answer from index prompt_tokens on."""

    input_ids: Sequence[int]
    prompt_tokens: int


@dataclass
class Acceptance:
    """Counts that add up over rows. Position i is judged in rounds that accepted i drafts and whose text went on."""

    rounds: int = 0
    committed: int = 0
    judged: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    @property
    def length(self) -> float:
        """Mean tokens committed per target pass (acceptance length τ); 1.0 without rounds."""
        return self.committed / self.rounds if self.rounds else 1.0

    @property
    def by_position(self) -> list[float]:
        """P(draft i+1 accepted | drafts 1…i accepted); 0.0 where never judged."""
        return [a / j if j else 0.0 for a, j in zip(self.accepted, self.judged, strict=True)]

    def __add__(self, other: "Acceptance") -> "Acceptance":
        size = max(len(self.judged), len(other.judged))

        def add(a: list[int], b: list[int]) -> list[int]:
            return [sum(x) for x in zip(a + [0] * (size - len(a)), b + [0] * (size - len(b)), strict=True)]

        return Acceptance(
            self.rounds + other.rounds,
            self.committed + other.committed,
            add(self.judged, other.judged),
            add(self.accepted, other.accepted),
        )


def total_acceptance(rows: Sequence[Acceptance]) -> Acceptance:
    return sum(rows, Acceptance())


@torch.no_grad()
def offline_acceptance(
    rows: Sequence[TextRow],
    target: HFTarget,
    draft: Draft,
    num_draft_tokens: int,
    max_batch_tokens: int = 4096,
) -> list[Acceptance]:
    """Per row, in order. The target must have been loaded with the draft's layers; only its states up to the last of them
    are used, so `final_state="none"` makes it faster.

    Raises DataError SF-EVAL-ROW when a row cannot be run or has no answer.
    """
    results: list[Acceptance | None] = [None] * len(rows)
    weight = next(draft.parameters())
    embedding, head = target.embedding_VH.to(weight.device), target.head_VH.to(weight.device)
    depth = min(num_draft_tokens, draft.max_draft_tokens or num_draft_tokens)
    for batch in _batches(rows, max_batch_tokens):
        ids, aux = _prefill(target, [(index, rows[index]) for index in batch])
        # A chain that starts after anchor x_s grows from row s − 1, and the first anchor is the first answer token.
        first = torch.tensor([rows[index].prompt_tokens - 1 for index in batch], device=weight.device)
        end = torch.tensor([len(rows[index].input_ids) - 2 for index in batch], device=weight.device)
        runs = draft.chain_runs(
            ids.to(weight.device), aux.to(weight.device, weight.dtype), embedding, depth, head, first, end
        ).tolist()
        for row, index in enumerate(batch):
            results[index] = _walk(rows[index], runs[row], depth)
    return [result for result in results if result is not None]


def ngram_acceptance(rows: Sequence[TextRow], num_draft_tokens: int) -> list[Acceptance]:
    """What the untrained n-gram drafter reaches on the same rows. Needs no target."""
    return [walk_drafter(NgramDrafter(), row, torch.empty(len(row.input_ids), 0), num_draft_tokens) for row in rows]


@torch.no_grad()
def walk_drafter(drafter: Drafter, row: TextRow, aux_TKH: torch.Tensor, num_draft_tokens: int) -> Acceptance:
    """Round by round with a drafter: slower than `offline_acceptance`, works for every drafter."""
    ids, result = list(row.input_ids), _empty(num_draft_tokens)
    done, position = 0, row.prompt_tokens
    while position < len(ids) - 1:
        drafter.extend(ids[done + 1 : position + 1], aux_TKH[done:position])
        done = position
        guesses = drafter.propose(num_draft_tokens)
        run = 0
        while run < len(guesses) and position + 1 + run < len(ids) and guesses[run] == ids[position + 1 + run]:
            run += 1
        position += _round(result, run, len(ids) - 1 - position, num_draft_tokens)
    return result


def _walk(row: TextRow, runs_T: list[int], k: int) -> Acceptance:
    result = _empty(k)
    position = row.prompt_tokens  # the anchor: the first answer token comes from the prefill
    last = len(row.input_ids) - 1
    while position < last:
        # A chain that starts after anchor x_s grows from row s − 1, the newest one with a target state.
        position += _round(result, runs_T[position - 1], last - position, k)
    return result


def _round(result: Acceptance, run: int, left: int, k: int) -> int:
    """Books one round that accepts `run` drafts with `left` text tokens to go; returns the tokens committed."""
    committed = min(run + 1, left)
    result.rounds += 1
    result.committed += committed
    for position in range(min(run + 1, k, left)):
        result.judged[position] += 1
        result.accepted[position] += position < run
    return committed


def _empty(k: int) -> Acceptance:
    return Acceptance(0, 0, [0] * k, [0] * k)


def _batches(rows: Sequence[TextRow], max_batch_tokens: int) -> Iterator[list[int]]:
    """Rows of similar length together, so that little is computed on padding."""
    batch: list[int] = []
    for index in sorted(range(len(rows)), key=lambda i: len(rows[i].input_ids)):
        row = rows[index]
        if not 0 < row.prompt_tokens < len(row.input_ids):
            raise DataError(
                "SF-EVAL-ROW",
                f"evaluation row {index}: prompt_tokens {row.prompt_tokens} must lie inside its {len(row.input_ids)} tokens",
            )
        if batch and (len(batch) + 1) * len(row.input_ids) > max_batch_tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def _prefill(target: HFTarget, rows: Sequence[tuple[int, TextRow]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Padded ids [B, T] and aux states [B, T, K·H]."""
    captured = target.capture([row.input_ids for _, row in rows])
    length = max(len(row.input_ids) for _, row in rows)
    ids = torch.zeros(len(rows), length, dtype=torch.int64)
    parts = []
    for place, ((index, row), item) in enumerate(zip(rows, captured, strict=True)):
        if isinstance(item, CaptureItemError):
            raise DataError("SF-EVAL-ROW", f"evaluation row {index} cannot be run through the target: {item}")
        ids[place, : len(row.input_ids)] = torch.tensor(list(row.input_ids))
        aux = item["aux_states"]
        parts.append(torch.nn.functional.pad(aux, (0, 0, 0, length - len(aux))))
    return ids, torch.stack(parts)
