"""Every strategy trains on, decodes with and exports for a target of every architecture (tiny, random, on the CPU)."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.architectures import ARCHITECTURES, HIDDEN, TOKENS, VOCAB, gemma2, granite, make_target, qwen3_next
from transformers import PretrainedConfig

from specfleet.config.models import RunConfig
from specfleet.contracts.errors import ConfigError, DataError
from specfleet.data.prepare import prepare_prompt_set
from specfleet.data.prompt_set import Prompt, PromptSet
from specfleet.drafts.base import Draft
from specfleet.drafts.decode import decode_greedy
from specfleet.drafts.export import LAYOUTS, export_draft, load_export
from specfleet.target.facts import build_contract, read_target_facts
from specfleet.target.hf import HFTarget
from specfleet.target.weights import load_embedding, load_head
from specfleet.trainer.strategies.base import Prepared, Strategy
from specfleet.trainer.strategies.table import STRATEGIES, build_strategy
from specfleet.wire.records_pb2 import CaptureContract

pytestmark = pytest.mark.integration

SECTIONS: dict[str, dict[str, Any]] = {
    "eagle3": {"draft_vocab_size": 300, "ttt_length": 3},
    "peagle": {"draft_vocab_size": 300, "num_layers": 2, "num_depths": 3},
    "dflash": {"num_layers": 2, "block_size": 4},
    "domino": {"num_layers": 2, "block_size": 4, "gru_hidden_size": 16, "embedding_size": 8},
    "dspark": {"num_layers": 2, "block_size": 4, "markov_rank": 8},
}
GUESSES, NEW_TOKENS = 3, 8


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Any:
    """Matrices this small are slower on several threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@dataclass
class Target:
    """One target directory and the prompts made for it."""

    path: Path

    @cached_property
    def prompt_set(self) -> PromptSet:
        rows = [
            {"id": str(n), "messages": [
                {"role": "user", "content": f"What is {n} and 4?"},
                {"role": "assistant", "content": f"The answer is {n + 4}. Let me explain."},
            ]}
            for n in range(3)
        ]  # fmt: skip
        source = self.path.parent / f"{self.path.name}.jsonl"
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return prepare_prompt_set([source], self.path, self.path.parent / f"{self.path.name}-sets")

    @cached_property
    def prompts(self) -> list[Prompt]:
        return self.prompt_set.read(range(len(self.prompt_set)))

    @cached_property
    def prompt(self) -> list[int]:
        return self.prompts[0].input_ids[: self.prompts[0].prompt_tokens]

    @cached_property
    def answer(self) -> list[int]:
        """The target's own greedy answer."""
        return decode_greedy(HFTarget.load(self.path, (), "float32"), None, self.prompt, NEW_TOKENS, 0).ids

    def config(self, name: str, **section: Any) -> RunConfig:
        return RunConfig.model_validate(
            {
                "model": {"target": str(self.path), "dtype": "float32"},
                "data": {"prompt_set": str(self.prompt_set.path)},
                "strategy": {"name": name, **SECTIONS[name], **section},
            }
        )

    def contract(self, name: str) -> CaptureContract:
        return build_contract(self.config(name), read_target_facts(self.path))

    def load(self, contract: CaptureContract, **options: Any) -> HFTarget:
        return HFTarget.load(self.path, contract.layers, contract.dtype, final_state=contract.final_state, **options)

    def strategy(self, name: str, **section: Any) -> Strategy:
        torch.manual_seed(0)
        contract = self.contract(name)
        strategy = build_strategy(
            self.config(name, **section), contract, self.path, self.prompt_set, 4, torch.device("cpu"), torch.float32
        )
        strategy.begin_step(3)  # past the first half, when Domino's correction is trained too
        return strategy

    def samples(self, target: HFTarget) -> list[dict[str, torch.Tensor]]:
        samples = []
        for prompt, features in zip(self.prompts, target.capture([p.input_ids for p in self.prompts]), strict=True):
            assert isinstance(features, dict)
            samples.append(
                {
                    "input_ids": torch.tensor(prompt.input_ids, dtype=torch.int32),
                    "loss_mask": torch.frombuffer(bytearray(prompt.loss_mask), dtype=torch.uint8),
                    "visit": torch.tensor([0, prompt.index]),
                    **features,
                }
            )
        return samples


@pytest.fixture(scope="session")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Target]:
    """Each architecture's target, made when first asked for."""
    folder, made = tmp_path_factory.mktemp("architectures"), dict[str, Target]()

    def get(name: str, config: Callable[[], PretrainedConfig] | None = None) -> Target:
        if name not in made:
            made[name] = Target(make_target(folder / name, (config or ARCHITECTURES[name])()))
        return made[name]

    return get


def loss_of(strategy: Strategy, prepared: Prepared) -> torch.Tensor:
    numerators = strategy.objective(prepared).numerators
    assert numerators.keys() == prepared.denominators.keys() == strategy.term_weights.keys()
    assert all(float(count) > 0 for count in prepared.denominators.values())
    terms = [weight * numerators[name] / prepared.denominators[name] for name, weight in strategy.term_weights.items()]
    return torch.stack(terms).sum()


def first_guesses(draft: Draft, target: HFTarget, tiny: Target) -> list[int]:
    """What the draft proposes after the prompt and the first token of the answer."""
    drafter = draft.drafter(target.embedding_VH, target.head_VH)
    _, aux, _ = target.forward(torch.tensor([tiny.prompt]))
    drafter.extend([*tiny.prompt[1:], tiny.answer[0]], aux)
    return drafter.propose(GUESSES)


def test_every_registered_strategy_is_tried() -> None:
    assert SECTIONS.keys() == STRATEGIES.keys()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@torch.no_grad()
def test_capture_equals_the_models_own_states_and_logits(architecture: str, targets: Callable[[str], Target]) -> None:
    tiny = targets(architecture)
    contract = tiny.contract("eagle3")
    assert (contract.hidden_size, contract.vocab_size) == (HIDDEN, VOCAB)
    target = tiny.load(contract, extras=("teacher_argmax", "teacher_lse"))
    texts = [list(range(5, 35)), [7, 8, 9], list(range(100, 119))]
    head = load_head(tiny.path)
    torch.testing.assert_close(load_embedding(tiny.path), target.embedding_VH)
    for text, item in zip(texts, target.capture(texts), strict=True):
        assert isinstance(item, dict)
        expected = target.model(input_ids=torch.tensor([text]), output_hidden_states=True)
        aux = torch.cat([expected.hidden_states[layer + 1][0] for layer in contract.layers], dim=-1)
        torch.testing.assert_close(item["aux_states"], aux, rtol=1e-4, atol=1e-4)
        logits = expected.logits[0]
        torch.testing.assert_close(item["final_state"] @ head.T, logits, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(item["teacher_lse"], logits.logsumexp(-1), rtol=1e-4, atol=1e-4)
        assert torch.equal(item["teacher_argmax"], logits.argmax(-1).int())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@torch.no_grad()
def test_rejected_guesses_leave_no_trace_in_the_cache(architecture: str, targets: Callable[[str], Target]) -> None:
    """Prompt and guesses are longer than any window of the sliding layers."""
    tiny = targets(architecture)
    target = tiny.load(tiny.contract("dflash"))
    text = list(range(5, 35))
    cache = target.new_cache()
    target.forward(torch.tensor([text[:20]]), cache)
    target.forward(torch.tensor([[300, 301, 302, 303]]), cache)
    target.crop(cache, 15)
    got = target.forward(torch.tensor([text[15:]]), cache)
    for part, expected in zip(got, target.forward(torch.tensor([text])), strict=True):
        torch.testing.assert_close(part, expected[15:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", SECTIONS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_trains_decodes_and_exports(
    architecture: str, name: str, targets: Callable[[str], Target], tmp_path: Path
) -> None:
    tiny = targets(architecture)
    contract, strategy = tiny.contract(name), tiny.strategy(name)
    target = tiny.load(contract)
    prepared = strategy.prepare(strategy.collate(tiny.samples(target)))
    optimizer = torch.optim.AdamW(strategy.draft.parameters(), lr=1e-3)
    before = loss_of(strategy, prepared)
    before.backward()
    for parameter_name, parameter in strategy.draft.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.isfinite().all(), parameter_name
    optimizer.step()
    assert float(loss_of(strategy, prepared).detach()) < float(before.detach())

    drafter = strategy.draft.drafter(target.embedding_VH, target.head_VH)
    assert decode_greedy(target, drafter, tiny.prompt, NEW_TOKENS, GUESSES).ids == tiny.answer
    for layout in (layout for layout in LAYOUTS if layout.kind == strategy.draft.kind):
        exported = export_draft(strategy.draft, layout.engine, tmp_path / layout.engine, dtype=torch.float32)
        loaded = load_export(exported.directory)
        assert loaded.config == strategy.draft.config
        guesses = first_guesses(loaded, target, tiny)
        assert len(guesses) == GUESSES
        assert guesses == first_guesses(strategy.draft, target, tiny)


@pytest.mark.parametrize("name", ["peagle", "dflash", "domino", "dspark"])
def test_the_mask_token_is_the_first_row_of_the_padding(name: str, targets: Callable[[str], Target]) -> None:
    assert targets("qwen3").strategy(name).draft.config.mask_token_id == TOKENS


@pytest.mark.parametrize(
    ("name", "section"),
    [
        ("dflash", {}),
        ("domino", {}),
        ("dspark", {"ce_weight": 1.0, "l1_weight": 0.0, "confidence_head": False}),
    ],
)
@torch.no_grad()
def test_a_draft_that_learns_from_tokens_never_meets_the_targets_scale(
    name: str, section: dict[str, Any], targets: Callable[..., Target]
) -> None:
    """Engines multiply a draft's states with the target's head as stored, so that is what it must be trained with.

    Two targets that differ in the scale of their logits alone have the same states, so the drafts must have the same loss.
    """
    scaled, plain = targets("granite"), targets("granite-unscaled", lambda: granite(logits_scaling=1.0))
    torch.testing.assert_close(load_head(scaled.path) * 8, load_head(plain.path))
    samples = plain.samples(plain.load(plain.contract(name)))
    losses = []
    for tiny in (scaled, plain):
        strategy = tiny.strategy(name, **section)
        losses.append(loss_of(strategy, strategy.prepare(strategy.collate(samples))))
    torch.testing.assert_close(losses[0], losses[1])


@torch.no_grad()
def test_the_teacher_of_a_block_draft_has_the_targets_scale(targets: Callable[[str], Target]) -> None:
    """teacher_top1 is the probability the target gives its favourite: a known function of its own logits."""
    tiny = targets("granite")
    target, strategy = tiny.load(tiny.contract("dspark")), tiny.strategy("dspark")
    samples = tiny.samples(target)
    batch = strategy.collate(samples)
    states, of = batch["teacher_states"].clone(), batch["teacher_of"].clone()
    top = (states @ load_head(tiny.path).T).softmax(-1).max(-1).values[of]
    total, count = strategy.objective(strategy.prepare(batch)).metrics["teacher_top1"]
    torch.testing.assert_close(total / count, top.mean())


def test_capped_logits_are_refused_before_anything_is_captured(targets: Callable[..., Target]) -> None:
    tiny = targets("gemma2", gemma2)
    with pytest.raises(DataError, match="SF-TARGET-LOGITS"):
        tiny.contract("eagle3")
    with pytest.raises(DataError, match="SF-TARGET-LOGITS"):
        HFTarget.load(tiny.path, (1,), "float32")


def test_recurrent_targets_are_captured_but_not_decoded(targets: Callable[..., Target]) -> None:
    tiny = targets("qwen3-next", qwen3_next)
    target = tiny.load(tiny.contract("dflash"))
    (item,) = target.capture([[5, 6, 7, 8]])
    assert isinstance(item, dict)
    assert item["aux_states"].isfinite().all()
    with pytest.raises(ConfigError, match=r"SF-TARGET-CACHE.*LinearAttentionLayer"):
        decode_greedy(target, None, [5, 6, 7], 4, 0)
