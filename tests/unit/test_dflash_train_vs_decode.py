"""Training logits of block drafts equal those of the reference decoder, and a learnt text is accepted whole."""

from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.blocks import LAYERS, MASK, tiny_dflash
from fixtures.checkpoints import write_checkpoint

from specfleet.config.strategies import DFlashSection
from specfleet.drafts.acceptance import TextRow, offline_acceptance, walk_drafter
from specfleet.drafts.block import BlockDrafter
from specfleet.drafts.checkpoint import load_draft_checkpoint
from specfleet.drafts.decode import decode_greedy
from specfleet.drafts.dflash import DFlashDraft
from specfleet.drafts.export import export_draft, load_export
from specfleet.target.hf import HFTarget
from specfleet.trainer.strategies.dflash import DFlashStrategy

WINDOW = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7}


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> HFTarget:
    return HFTarget.load(tiny_target, LAYERS, dtype="float32", final_state="none")


def features(target: HFTarget, texts: list[list[int]], prompt: int) -> list[dict[str, torch.Tensor]]:
    samples = []
    for text, item in zip(texts, target.capture(texts), strict=True):
        assert isinstance(item, dict)
        mask = torch.ones(len(text), dtype=torch.uint8)
        mask[:prompt] = 0
        samples.append({**item, "input_ids": torch.tensor(text, dtype=torch.int32), "loss_mask": mask})
    return samples


def strategy_for(draft: DFlashDraft, target: HFTarget, **section: Any) -> DFlashStrategy:
    values = {"name": "dflash", "block_size": draft.config.block_size, "num_anchors": 1000, **section}
    return DFlashStrategy(DFlashSection(**values), draft, target.embedding_VH, target.head_VH)


def largest_gap(draft: DFlashDraft, target: HFTarget, texts: list[list[int]]) -> float:
    """Largest |training logit − decoding logit| over every anchor and slot of every text."""
    batch = strategy_for(draft, target).collate(features(target, texts, prompt=0))
    gap, compared = 0.0, 0
    with torch.no_grad():
        context = draft.context(batch["context_states"], batch["context_positions"])
        trained = draft.blocks(context, batch["anchors"], batch["anchor_ids"], batch["starts"], target.embedding_VH)
        for index, text in enumerate(texts):
            item = target.capture([text])[0]
            assert isinstance(item, dict)
            drafter = draft.drafter(target.embedding_VH, target.head_VH)
            done = 0
            mine = batch["sample"] == index
            for anchor, hidden in zip(batch["anchors"][mine].tolist(), trained[mine], strict=True):
                if anchor == 0:
                    continue  # decoding always has at least one verified state
                drafter.extend(text[done + 1 : anchor + 1], item["aux_states"][done:anchor])
                done = anchor
                gap = max(gap, float(((hidden - drafter.block()) @ target.head_VH.T).abs().max()))
                compared += 1
    assert compared == sum(len(text) - 2 for text in texts)
    return gap


@pytest.mark.parametrize(
    "changes",
    [
        {},
        WINDOW,
        {"num_key_value_heads": 4, "block_size": 8, "num_layers": 3},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
        {"sample_from_anchor": True},
    ],
    ids=["full", "sliding", "mha", "yarn", "anchor"],
)
def test_training_logits_equal_decoding_logits(target: HFTarget, changes: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(5)
    texts = [torch.randint(0, 384, (n,), generator=generator).tolist() for n in (23, 15)]
    assert largest_gap(tiny_dflash(seed=1, **changes), target, texts) < 1e-4


@pytest.mark.parametrize("layers", [(3,), (0, 1, 2, 3, 4)], ids=["one", "five"])
def test_with_other_numbers_of_captured_layers(tiny_target: Path, layers: tuple[int, ...]) -> None:
    target = HFTarget.load(tiny_target, layers, dtype="float32", final_state="none")
    text = torch.randint(0, 384, (14,), generator=torch.Generator().manual_seed(5)).tolist()
    assert largest_gap(tiny_dflash(seed=1, layer_ids=list(layers), num_layers=1), target, [text]) < 1e-4


def test_the_test_can_fail(target: HFTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoder that sees one state too few, as if the context ended before the anchor's neighbour, is noticed."""
    draft, texts = (
        tiny_dflash(seed=1),
        [torch.randint(0, 384, (14,), generator=torch.Generator().manual_seed(2)).tolist()],
    )
    assert largest_gap(draft, target, texts) < 1e-4
    block = BlockDrafter.block

    def short(self: BlockDrafter) -> torch.Tensor:
        self._length -= 1
        try:
            return block(self)
        finally:
            self._length += 1

    monkeypatch.setattr(BlockDrafter, "block", short)
    assert largest_gap(draft, target, texts) > 1e-3


@pytest.mark.parametrize("k", [2, 4, 9])
def test_chain_hits_are_what_the_drafter_would_be_accepted_for(target: HFTarget, k: int) -> None:
    """Text and guesses use the same three tokens, so that runs of all lengths occur by chance."""
    draft, generator = tiny_dflash(seed=2), torch.Generator().manual_seed(1)
    head = torch.zeros_like(target.head_VH)
    head[5:8] = torch.randn(3, 32, generator=generator)
    texts = [torch.randint(5, 8, (n,), generator=generator).tolist() for n in (40, 25)]
    captured = [item["aux_states"] for item in target.capture(texts) if isinstance(item, dict)]
    ids, aux = torch.zeros(2, 40, dtype=torch.int64), torch.full((2, 40, 96), 1e3)
    for index, (text, states) in enumerate(zip(texts, captured, strict=True)):
        ids[index, : len(text)], aux[index, : len(text)] = torch.tensor(text), states
    wanted = torch.rand(2, 40, generator=generator) < 0.7
    hits = draft.chain_hits(ids, aux, target.embedding_VH, k, head, wanted)
    assert not hits[:, -2:].any()
    seen = set()
    for index, text in enumerate(texts):
        drafter = draft.drafter(target.embedding_VH, head)
        for row in range(len(text) - 2):
            drafter.extend([text[row + 1]], captured[index][row : row + 1])
            guesses = drafter.propose(k)
            assert len(guesses) == min(k, 4)
            run = next(
                (i for i, (a, b) in enumerate(zip(guesses, text[row + 2 :], strict=False)) if a != b), len(guesses)
            )
            if wanted[index, row] and row + 2 + k <= len(text):
                assert hits[index, row].tolist() == [i < run for i in range(k)]
                seen.add(run)
    assert seen >= {0, 1, 2}


def test_offline_acceptance_equals_decoding(target: HFTarget) -> None:
    draft = tiny_dflash(seed=3)
    _learn(draft, target, (text := _greedy_text(target, 40)), steps=30)
    prompt = text[:6]
    decoded = decode_greedy(target, draft.drafter(target.embedding_VH, target.head_VH), prompt, 34, 9)
    row = TextRow(prompt + decoded.ids, len(prompt))
    offline = offline_acceptance([row], target, draft, 9)[0]
    assert prompt + decoded.ids == text
    assert 1.0 < offline.length < draft.config.block_size
    assert (offline.rounds, offline.committed) == (len(decoded.committed), sum(decoded.committed))
    item = target.capture([row.input_ids])[0]
    assert isinstance(item, dict)
    walked = walk_drafter(draft.drafter(target.embedding_VH, target.head_VH), row, item["aux_states"], 4)
    assert walked == offline


def _greedy_text(target: HFTarget, length: int, seed: int = 4) -> list[int]:
    prompt = torch.randint(3, 384, (6,), generator=torch.Generator().manual_seed(seed)).tolist()
    return [*prompt, *decode_greedy(target, None, prompt, length - len(prompt), 1).ids]


def _learn(draft: DFlashDraft, target: HFTarget, text: list[int], steps: int, **section: Any) -> None:
    strategy = strategy_for(draft, target, **section)
    batch = strategy.collate(features(target, [text], prompt=6))
    optimizer = torch.optim.AdamW(draft.parameters(), lr=5e-3)
    for _ in range(steps):
        prepared = strategy.prepare(dict(batch))
        loss = strategy.objective(prepared).numerators["ce"] / prepared.denominators["ce"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pytest.mark.parametrize("loss", ["ce", "dpace", "dpace_cumulative", "dpace_continuation"])
def test_one_learnt_text_is_accepted_whole_and_survives_export(target: HFTarget, loss: str, tmp_path: Path) -> None:
    draft = tiny_dflash(seed=6, **(WINDOW if loss == "ce" else {}))
    size = draft.config.block_size
    text = _greedy_text(target, 6 + 1 + 6 * size)
    _learn(draft, target, text, steps=200, loss=loss)
    draft.eval()

    def decode(model: Any) -> Any:
        drafter = model.drafter(target.embedding_VH, target.head_VH)
        return decode_greedy(target, drafter, text[:6], 1 + 6 * size, size - 1)

    decoded = decode(draft)
    assert text[:6] + decoded.ids == text
    assert decoded.acceptance_length == size
    reloaded = load_draft_checkpoint(write_checkpoint(tmp_path / "checkpoint", draft))[0]
    layouts = ["sglang"] if loss == "ce" else ["sglang", "vllm"]  # vLLM has no sliding layers
    for layout in layouts:
        export_draft(reloaded, layout, tmp_path / layout, dtype=torch.float32)
        loaded = load_export(tmp_path / layout)
        assert loaded.config == draft.config
        again = decode(loaded)
        assert (again.ids, again.accepted) == (decoded.ids, decoded.accepted)


def test_a_wrong_mask_token_breaks_the_learnt_text(target: HFTarget) -> None:
    """The negative control: the served id must be the trained one."""
    draft, text = tiny_dflash(seed=6), _greedy_text(target, 6 + 1 + 20)
    _learn(draft, target, text, steps=150)
    right = decode_greedy(target, draft.drafter(target.embedding_VH, target.head_VH), text[:6], 21, 4)
    config = {**draft.config.to_dict(), "mask_token_id": MASK + 1}
    other = DFlashDraft.from_config(config)
    other.load_state_dict(draft.state_dict())
    wrong = decode_greedy(target, other.drafter(target.embedding_VH, target.head_VH), text[:6], 21, 4)
    assert wrong.ids == right.ids
    assert wrong.acceptance_length < right.acceptance_length == 5.0
