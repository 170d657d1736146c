"""The reference decoder: lossless whatever the draft, honest about what it accepted; and the offline estimate of the same."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from fixtures.eagle3 import LAYERS, tiny_draft, tiny_strategy

from specfleet.contracts.errors import DataError
from specfleet.drafts.acceptance import (
    Acceptance,
    TextRow,
    ngram_acceptance,
    offline_acceptance,
    total_acceptance,
    walk_drafter,
)
from specfleet.drafts.base import Drafter, Pick, likeliest
from specfleet.drafts.decode import cut, decode_greedy
from specfleet.drafts.eagle3 import Eagle3Draft
from specfleet.drafts.ngram import NgramDrafter
from specfleet.drafts.verification import verify
from specfleet.target.hf import HFTarget

PROMPTS = [[5, 9, 40, 7], [300, 12, 12, 80, 33, 6], [77]]
EOS = (2,)
LIMIT = 28


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> HFTarget:
    return HFTarget.load(tiny_target, LAYERS, dtype="float32")


@pytest.fixture(scope="module")
def answers(target: HFTarget) -> list[list[int]]:
    return [decode_greedy(target, None, prompt, LIMIT, 0, EOS).ids for prompt in PROMPTS]


class Oracle(Drafter):
    """Knows the whole text; its guess `wrong_at` (counted over all guesses of a round) is off by one."""

    def __init__(self, text: Sequence[int], wrong_at: int | None = None) -> None:
        self.text, self.wrong_at, self.known = list(text), wrong_at, 1
        self.rows = 0

    def extend(self, next_ids: Sequence[int], aux_TKH: torch.Tensor) -> None:
        assert list(next_ids) == self.text[self.known : self.known + len(next_ids)]
        assert len(next_ids) == len(aux_TKH)
        self.known += len(next_ids)

    def propose(self, k: int, pick: Pick = likeliest) -> list[int]:
        guesses = (self.text[self.known : self.known + k] + [0] * k)[:k]
        if self.wrong_at is not None and self.wrong_at < k:
            guesses[self.wrong_at] = (guesses[self.wrong_at] + 1) % 384
        return guesses


def test_verification_example() -> None:
    """Drafts 7 8 9, target says 7 8 5: two accepted, bonus 5, three committed."""
    assert verify([7, 8, 9], [7, 8, 5, 1]) == 2
    assert verify([7, 8, 9], [7, 8, 9, 1]) == 3
    assert verify([], [4]) == 0
    assert cut([7, 8, 5], 9, EOS) == [7, 8, 5]
    assert cut([7, 2, 5], 9, EOS) == [7, 2]
    assert cut([7, 8, 5], 2, EOS) == [7, 8]


def test_plain_decoding_is_transformers_greedy_output(target: HFTarget, answers: list[list[int]]) -> None:
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        ids = list(prompt)
        for expected in answer:
            logits = target.model(input_ids=torch.tensor([ids])).logits[0, -1]
            assert int(logits.argmax()) == expected
            ids.append(expected)


@pytest.mark.parametrize("wrong_at", [None, 0, 2, 4])
def test_a_perfect_draft_is_accepted_up_to_its_error(
    target: HFTarget, answers: list[list[int]], wrong_at: int | None
) -> None:
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        result = decode_greedy(target, Oracle(prompt + answer, wrong_at), prompt, LIMIT, 5, EOS)
        assert result.ids == answer
        assert sum(result.committed) == len(answer) - 1
        full = 6 if wrong_at is None else wrong_at + 1
        assert all(count == full for count in result.committed[:-1])


@pytest.mark.parametrize(
    ("k", "switches"), [(1, {}), (7, {}), (3, {"fc_norm": True, "norm_output": True})], ids=["one", "seven", "eagle3.1"]
)
def test_lossless_with_an_untrained_draft(
    target: HFTarget, answers: list[list[int]], k: int, switches: dict[str, bool]
) -> None:
    draft = tiny_draft(seed=3, **switches)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert decode_greedy(target, draft.drafter(target.embedding_VH), prompt, LIMIT, k, EOS).ids == answer
        assert decode_greedy(target, NgramDrafter(), prompt, LIMIT, k, EOS).ids == answer


def test_stops_at_an_end_token_inside_a_block_and_at_the_limit(target: HFTarget, answers: list[list[int]]) -> None:
    prompt, answer = PROMPTS[1], answers[1]
    end = answer[9]
    first = answer.index(end)
    result = decode_greedy(target, Oracle(prompt + answer), prompt, LIMIT, 5, (end,))
    assert result.ids == answer[: first + 1]
    for limit in (1, 2, 8):
        assert decode_greedy(target, Oracle(prompt + answer), prompt, limit, 5, ()).ids == answer[:limit]


def _noisy_draft(target: HFTarget, answers: list[list[int]]) -> Eagle3Draft:
    """A draft trained for a moment on the answers, so that some of its guesses are right and some wrong."""
    draft = tiny_draft(seed=7, draft_vocab_size=384)
    strategy = tiny_strategy(draft, target.embedding_VH, target.head_VH, ttt_length=4)
    samples = []
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        text = prompt + answer
        captured = target.capture([text])[0]
        assert isinstance(captured, dict)
        mask = torch.tensor([0] * len(prompt) + [1] * len(answer), dtype=torch.uint8)
        samples.append({"input_ids": torch.tensor(text, dtype=torch.int32), "loss_mask": mask, **captured})
    prepared = strategy.prepare(strategy.collate(samples))
    optimizer = torch.optim.AdamW(draft.parameters(), lr=3e-3)
    for _ in range(25):
        loss = torch.stack(list(strategy.objective(prepared).numerators.values())).sum() / 100
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return draft


def test_offline_acceptance_equals_decoding(target: HFTarget, answers: list[list[int]]) -> None:
    draft, k = _noisy_draft(target, answers), 4
    rows = [TextRow(prompt + answer, len(prompt)) for prompt, answer in zip(PROMPTS, answers, strict=True)]
    offline = offline_acceptance(rows, target, draft, k, max_batch_tokens=100)
    for row, found in zip(rows, offline, strict=True):
        prompt = list(row.input_ids[: row.prompt_tokens])
        left = len(row.input_ids) - row.prompt_tokens
        decoded = decode_greedy(target, draft.drafter(target.embedding_VH), prompt, left, k, EOS)
        assert found.rounds == len(decoded.committed)
        assert found.committed == sum(decoded.committed)
        assert found.length == pytest.approx(decoded.acceptance_length)
        for position in range(k):
            assert found.accepted[position] == sum(count > position for count in decoded.accepted)
        aux = target.capture([row.input_ids])[0]
        assert isinstance(aux, dict)
        assert walk_drafter(draft.drafter(target.embedding_VH), row, aux["aux_states"], k) == found
    together = total_acceptance(offline)
    assert together.rounds == sum(found.rounds for found in offline)
    # The comparison means something only when guesses were right and wrong, beyond the first position too.
    assert 1.1 < together.length < k + 1
    assert together.accepted[1] > 0
    assert together.judged[0] > together.accepted[0] > 0


def test_ngram_acceptance_equals_decoding(target: HFTarget, answers: list[list[int]]) -> None:
    rows = [TextRow(prompt + answer, len(prompt)) for prompt, answer in zip(PROMPTS, answers, strict=True)]
    for row, found in zip(rows, ngram_acceptance(rows, 3), strict=True):
        left = len(row.input_ids) - row.prompt_tokens
        decoded = decode_greedy(target, NgramDrafter(), row.input_ids[: row.prompt_tokens], left, 3, EOS)
        assert (found.rounds, found.committed) == (len(decoded.committed), sum(decoded.committed))


def test_ngram_prefers_longer_and_later_matches_and_continues_loops() -> None:
    drafter = NgramDrafter()
    drafter.extend([1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3], torch.empty(11, 0))
    assert drafter.propose(2) == [4, 9]  # [1, 2, 3] beats the later [2, 3] → 5
    drafter.extend([7, 8, 7, 8, 7], torch.empty(5, 0))
    assert drafter.propose(5) == [8, 7, 8, 7, 8]
    drafter.extend([99], torch.empty(1, 0))
    assert drafter.propose(3) == []


def test_acceptance_counts_add_up() -> None:
    a, b = Acceptance(2, 5, [2, 1], [1, 1]), Acceptance(1, 1, [1, 0], [0, 0])
    assert (a + b) == Acceptance(3, 6, [3, 1], [1, 1])
    assert (a + b).length == 2.0
    assert (a + b).by_position == pytest.approx([1 / 3, 1.0])
    assert total_acceptance([]).length == 1.0


def test_a_row_without_an_answer_is_named(target: HFTarget) -> None:
    with pytest.raises(DataError, match="row 1"):
        offline_acceptance([TextRow([1, 2, 3], 2), TextRow([1, 2], 2)], target, tiny_draft(), 3)
