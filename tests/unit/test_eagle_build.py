"""From a run configuration to a strategy of the EAGLE family: sizes, vocabulary, teacher, warm start."""

from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.tiny_runs import TEXTS, tiny_prompt_set, tiny_run
from safetensors.torch import save_file

from specfleet.config.models import RunConfig
from specfleet.contracts.errors import ConfigError
from specfleet.data.prompt_set import PromptSet
from specfleet.drafts.eagle3 import Eagle3Draft
from specfleet.drafts.export import export_draft
from specfleet.drafts.peagle import PEagleDraft
from specfleet.target.facts import build_contract, read_target_facts
from specfleet.target.hf import HFTarget
from specfleet.target.weights import load_raw_head
from specfleet.trainer.strategies.base import Strategy
from specfleet.trainer.strategies.table import build_strategy


@pytest.fixture(scope="module")
def prompt_set(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> PromptSet:
    return tiny_prompt_set(tmp_path_factory.mktemp("prompts"), tiny_target)


def _build(tiny_target: Path, prompt_set: PromptSet, extras: tuple[str, ...] = (), **section: Any) -> Strategy:
    return tiny_run(tiny_target, prompt_set, {"layers": [1, 2, 4], "intermediate_size": 48, **section}, extras)[1]


def _step(strategy: Strategy, tiny_target: Path, extras: tuple[str, ...] = ()) -> float:
    """Loss of one real micro-batch, backward included."""
    target = HFTarget.load(tiny_target, (1, 2, 4), dtype="float32", extras=extras)
    samples = []
    for index, (text, item) in enumerate(zip(TEXTS, target.capture(TEXTS), strict=True)):
        assert isinstance(item, dict)
        mask = torch.tensor([0] * 4 + [1] * (len(text) - 4), dtype=torch.uint8)
        ids = torch.tensor(text, dtype=torch.int32)
        samples.append({"input_ids": ids, "loss_mask": mask, "visit": torch.tensor([0, index]), **item})
    prepared = strategy.prepare(strategy.collate(samples))
    numerators = strategy.objective(prepared).numerators
    loss = torch.stack(list(numerators.values())).sum()
    loss.backward()
    assert all(parameter.grad is not None for parameter in strategy.draft.parameters())
    assert sum(float(count) for count in prepared.denominators.values()) > 0
    return float(loss.detach())


@pytest.mark.parametrize(
    "section",
    [
        {"draft_vocab_size": 96},
        {"draft_vocab_size": 96, "fc_norm": True, "norm_output": True, "lk": "lambda", "ttt_schedule": "sampled"},
        {"draft_vocab_size": 0, "head": "target", "lk": "alpha", "ttt_schedule": "curriculum"},
        {"draft_vocab_size": 96, "experts": 3},
        {"name": "peagle", "draft_vocab_size": 96, "num_layers": 2, "num_depths": 3, "mask_token_id": 383},
        {"name": "peagle", "draft_vocab_size": 0, "num_layers": 1, "num_depths": 3, "mask_token_id": 383},
    ],
    ids=["eagle3", "eagle3.1-lk", "target-head", "experts", "peagle", "peagle-full"],
)
def test_every_combination_trains(tiny_target: Path, prompt_set: PromptSet, section: dict[str, Any]) -> None:
    strategy = _build(tiny_target, prompt_set, **section)
    assert strategy.identity()["strategy"] == section.get("name", "eagle3")
    assert _step(strategy, tiny_target) > 0


@pytest.mark.parametrize(
    ("section", "extras"),
    [
        ({"draft_vocab_size": 96}, ("teacher_argmax",)),
        ({"draft_vocab_size": 96, "lk": "lambda"}, ("teacher_argmax", "teacher_lse")),
        ({"name": "peagle", "draft_vocab_size": 96, "mask_token_id": 383}, ("teacher_argmax",)),
    ],
)
def test_captured_facts_leave_nothing_to_do_for_the_full_head(
    tiny_target: Path, prompt_set: PromptSet, section: dict[str, Any], extras: tuple[str, ...]
) -> None:
    """The whole head is not even in memory, and the loss is that of a trainer that has it."""
    lean, complete = (_build(tiny_target, prompt_set, names, **section) for names in (extras, ()))
    heads = [strategy._teacher._full_head for strategy in (lean, complete)]  # type: ignore[attr-defined]
    assert heads[0] is None
    assert heads[1].shape == (384, 32)
    assert _step(lean, tiny_target, extras) == pytest.approx(_step(complete, tiny_target), rel=1e-5)


def test_vocabulary_holds_supervised_and_stop_tokens(tiny_target: Path, prompt_set: PromptSet) -> None:
    draft = _build(tiny_target, prompt_set, draft_vocab_size=64).draft
    assert isinstance(draft, Eagle3Draft)
    supervised = torch.tensor(sorted({token for text in TEXTS for token in text[4:]}))
    assert draft.t2d[supervised].all()
    # In a vocabulary too small for what is supervised, a stop token that never is takes the place of the rarest.
    cramped = _build(tiny_target, prompt_set, draft_vocab_size=8).draft
    assert isinstance(cramped, Eagle3Draft)
    chosen = set(cramped.t2d.nonzero().flatten().tolist())
    assert chosen - set(supervised.tolist()) == {2}
    for everything in (0, 100_000):
        full = _build(tiny_target, prompt_set, draft_vocab_size=everything).draft
        assert isinstance(full, Eagle3Draft)
        assert (full.config.draft_vocab_size, bool(full.t2d.all()), bool(full.d2t.any())) == (384, True, False)


def test_peagle_starts_from_the_targets_embedding(tiny_target: Path, prompt_set: PromptSet) -> None:
    draft = _build(tiny_target, prompt_set, name="peagle", draft_vocab_size=96, mask_token_id=383).draft
    assert isinstance(draft, PEagleDraft)
    target = HFTarget.load(tiny_target, (), dtype="float32")
    assert torch.equal(draft.embed_tokens.weight, target.embedding_VH)
    assert draft.embed_tokens.weight.requires_grad


@pytest.mark.parametrize(
    "section",
    [{"draft_vocab_size": 96}, {"name": "peagle", "draft_vocab_size": 96, "num_layers": 2, "mask_token_id": 383}],
    ids=["eagle3", "peagle"],
)
def test_warm_start(tiny_target: Path, prompt_set: PromptSet, tmp_path: Path, section: dict[str, Any]) -> None:
    first = _build(tiny_target, prompt_set, **section)
    with torch.no_grad():
        for parameter in first.draft.parameters():
            parameter.add_(0.01)
    export_draft(first.draft, "vllm", tmp_path / "out", dtype=torch.float32)
    # The mask token comes from the starting draft, too.
    again = {key: value for key, value in section.items() if key != "mask_token_id"}
    second = _build(tiny_target, prompt_set, init_from=str(tmp_path / "out"), **again)
    ours, theirs = second.draft.state_dict(), first.draft.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert second.identity() == first.identity()


def test_a_contract_without_final_states_is_refused(tiny_target: Path, prompt_set: PromptSet) -> None:
    config = RunConfig.model_validate(
        {"model": {"target": str(tiny_target)}, "data": {"prompt_set": str(prompt_set.path)}}
    )
    contract = build_contract(config, read_target_facts(tiny_target))
    contract.final_state = "none"
    with pytest.raises(ConfigError, match="needs final_state post_norm"):
        build_strategy(config, contract, tiny_target, prompt_set, 20, torch.device("cpu"), torch.float32)


def test_padding_rows_of_the_head_never_win(tiny_target: Path, prompt_set: PromptSet, tmp_path: Path) -> None:
    """A checkpoint padded to 400 rows, the padding larger than everything: the teacher is that of 384 rows."""
    for file in tiny_target.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    raw = load_raw_head(tiny_target)
    padded = torch.cat((raw, torch.full((16, 32), 50.0)))
    save_file({"model.embed_tokens.weight": padded, "lm_head.weight": padded.clone()}, tmp_path / "model.safetensors")
    plain, wide = (_build(target, prompt_set, draft_vocab_size=96) for target in (tiny_target, tmp_path))
    assert _step(wide, tiny_target) == pytest.approx(_step(plain, tiny_target), rel=1e-6)
    peagle = _build(tmp_path, prompt_set, name="peagle", draft_vocab_size=96, mask_token_id=383).draft
    assert peagle.get_parameter("embed_tokens.weight").shape == (384, 32)
