"""The test that catches every shift, rotary, mask and norm error: training logits equal those of step-by-step decoding."""

from pathlib import Path

import pytest
import torch
from fixtures.eagle3 import LAYERS, tiny_draft

from specfleet.drafts.eagle3 import Eagle3Draft
from specfleet.target.hf import HFTarget

STEPS = 7


def largest_gap(draft: Eagle3Draft, target: HFTarget, texts: list[list[int]], first: int, last: int) -> float:
    """Largest |training logit − decoding logit| over rows first..last−1 of every text and all steps."""
    captured = target.capture(texts)
    padded = max(map(len, texts))
    ids = torch.zeros(len(texts), padded, dtype=torch.int64)
    # Padding is filled with large numbers: nothing may read it.
    aux = torch.full((len(texts), padded, len(target.layers) * target.embedding_VH.shape[1]), 1e3)
    for index, (text, item) in enumerate(zip(texts, captured, strict=True)):
        assert isinstance(item, dict)
        ids[index, : len(text)] = torch.tensor(text)
        aux[index, : len(text)] = item["aux_states"].float()
    rows = [(b, t) for b in range(len(texts)) for t in range(first, last) if t + 1 + STEPS < len(texts[b])]
    active = [torch.tensor([b * padded + t for b, t in rows])] * STEPS
    gap = 0.0
    with torch.no_grad():
        trained = [draft.logits(output) for output in draft.rollout(ids, aux, target.embedding_VH, active)]
        for b, text in enumerate(texts):
            drafter = draft.drafter(target.embedding_VH)
            done = 0
            for place, (_, t) in ((i, row) for i, row in enumerate(rows) if row[0] == b):
                drafter.extend(text[done + 1 : t + 2], aux[b, done : t + 1])
                done = t + 1
                _, decoded = drafter.chain(STEPS, forced=text[t + 2 : t + 2 + STEPS])
                gap = max(gap, *(float((trained[i][place] - decoded[i]).abs().max()) for i in range(STEPS)))
    assert rows
    return gap


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> HFTarget:
    return HFTarget.load(tiny_target, LAYERS, dtype="float32", final_state="none")


@pytest.mark.parametrize(
    "switches",
    [
        {},
        {"fc_norm": True, "norm_output": True},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
        {"num_key_value_heads": 4, "draft_vocab_size": 384},
        {"norm_output": True, "legacy_v030": True},
        {"legacy_v030": True},
    ],
    ids=["eagle3", "eagle3.1", "yarn", "full-vocabulary", "legacy", "legacy-off"],
)
def test_training_logits_equal_decoding_logits(target: HFTarget, switches: dict[str, object]) -> None:
    generator = torch.Generator().manual_seed(5)
    texts = [torch.randint(0, 384, (n,), generator=generator).tolist() for n in (26, 17)]
    assert largest_gap(tiny_draft(seed=1, **switches), target, texts, first=0, last=18) < 1e-4


@pytest.mark.parametrize("layers", [(3,), (0, 1, 2, 3, 4)], ids=["one", "five"])
def test_with_other_numbers_of_captured_layers(tiny_target: Path, layers: tuple[int, ...]) -> None:
    target = HFTarget.load(tiny_target, layers, dtype="float32", final_state="none")
    text = torch.randint(0, 384, (20,), generator=torch.Generator().manual_seed(5)).tolist()
    draft = tiny_draft(seed=1, layer_ids=list(layers), fc_norm=True)
    assert largest_gap(draft, target, [text], first=0, last=12) < 1e-4


def test_the_test_can_fail(target: HFTarget) -> None:
    """A rotary position that does not advance with the step is noticed."""
    draft = tiny_draft(seed=1)

    class Standing:
        def __init__(self, rope: object) -> None:
            self.rope, self.calls = rope, 0

        def at(self, positions: torch.Tensor, dtype: torch.dtype) -> object:
            self.calls += 1
            # The first call of a rollout makes step 0; later ones are the steps.
            return self.rope.at(positions - max(0, self.calls - 1), dtype)  # type: ignore[attr-defined]

    rope = draft.rope
    texts = [torch.randint(0, 384, (14,), generator=torch.Generator().manual_seed(2)).tolist()]
    assert largest_gap(draft, target, texts, 0, 4) < 1e-4
    rollout = draft.rollout

    def wrong(*arguments: object) -> list[torch.Tensor]:
        draft.rope = Standing(rope)  # type: ignore[assignment]
        try:
            return rollout(*arguments)  # type: ignore[arg-type]
        finally:
            draft.rope = rope

    draft.rollout = wrong  # type: ignore[method-assign, assignment]
    assert largest_gap(draft, target, texts, 0, 4) > 1e-3
