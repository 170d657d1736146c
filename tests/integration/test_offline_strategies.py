"""One feature set serves every strategy: the loader's batches equal those of states captured for that strategy alone."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.feature_sets import capture_one, load_target, record_feature_set

from specfleet.config import RunConfig
from specfleet.contracts.capture import contract_gaps, contract_hash, feature_table
from specfleet.contracts.ids import task_key
from specfleet.data.prepare import prepare_prompt_set
from specfleet.data.prompt_set import PromptSet
from specfleet.features.feature_set import FeatureSet
from specfleet.features.source import FeatureSetSource, features_url
from specfleet.target.facts import build_contract, read_target_facts
from specfleet.trainer.loader import Loader, Window
from specfleet.trainer.plans import PlanBook
from specfleet.trainer.strategies.table import STRATEGIES, build_strategy
from specfleet.wire.records_pb2 import CaptureContract, MicroBatch, SampleRef, StepPlan, TaskAttempt

pytestmark = pytest.mark.integration

SECTIONS: dict[str, dict[str, Any]] = {
    "eagle3": {"draft_vocab_size": 300, "ttt_length": 3},
    "peagle": {"draft_vocab_size": 300, "num_layers": 2, "mask_token_id": 383, "num_depths": 3},
    "dflash": {"num_layers": 2, "mask_token_id": 383, "block_size": 4},
    "domino": {"num_layers": 2, "mask_token_id": 383, "block_size": 4, "gru_hidden_size": 16, "embedding_size": 8},
    "dspark": {"num_layers": 2, "mask_token_id": 383, "block_size": 4, "markov_rank": 8},
}
PROMPTS = 4


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> PromptSet:
    folder = tmp_path_factory.mktemp("strategies")
    rows = [
        {"id": str(n), "messages": [
            {"role": "user", "content": f"What is {n} and 4?"},
            {"role": "assistant", "content": f"The answer is {n + 4}. Let me explain step by step."},
        ]}
        for n in range(PROMPTS)
    ]  # fmt: skip
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return prepare_prompt_set([folder / "rows.jsonl"], tiny_target, folder / "sets")


def run_config(target: Path, strategy: dict[str, Any], data: dict[str, Any]) -> RunConfig:
    return RunConfig.model_validate(
        {"model": {"target": str(target), "dtype": "float32"}, "data": data, "strategy": strategy}
    )


@pytest.fixture(scope="module")
def features(prompts: PromptSet, tiny_target: Path) -> FeatureSet:
    """Every layer that may be captured, the final state and the extras."""
    config = run_config(tiny_target, {"name": "dspark", "layers": [0, 1, 2, 3, 4]}, {"prompt_set": str(prompts.path)})
    contract = build_contract(config, read_target_facts(tiny_target))
    contract.extras.extend(["teacher_argmax", "teacher_lse"])
    return record_feature_set(prompts.path.parent / "features", contract, prompts, tiny_target)


def plan(prompts: PromptSet, contract: CaptureContract, url: str) -> StepPlan:
    """One window of two micro-batches, in another order than the set's."""
    refs = [
        SampleRef(
            attempt=TaskAttempt(task=task_key("offline", 1, index), attempt=1),
            contract_hash=contract_hash(contract),
            store=url,
            num_tokens=prompts.num_tokens_of(index),
        )
        for index in (2, 0, 3, 1)
    ]
    batches = [MicroBatch(samples=refs[:2]), MicroBatch(samples=refs[2:])]
    return StepPlan(run_id="offline", generation=1, step=1, kind=StepPlan.KIND_STEP, micro_batches=batches)


def test_every_registered_strategy_is_tried() -> None:
    assert SECTIONS.keys() == STRATEGIES.keys()


@pytest.mark.parametrize("name", SECTIONS)
def test_a_strategy_trains_from_the_common_set(
    name: str, features: FeatureSet, prompts: PromptSet, tiny_target: Path
) -> None:
    data = {"source": "features", "features": str(features.path)}
    config = run_config(tiny_target, {"name": name, **SECTIONS[name]}, data)
    contract = build_contract(config, read_target_facts(tiny_target))
    assert contract_gaps(features.manifest.contract, contract) == []
    assert list(contract.layers) != list(features.manifest.contract.layers)
    torch.manual_seed(0)
    strategy = build_strategy(config, contract, tiny_target, features.prompts, 4, torch.device("cpu"), torch.float32)
    strategy.begin_step(3)  # past the first half, when Domino's correction is trained too

    url = features_url(features)
    lost: list[Any] = []
    loader = Loader(
        FeatureSetSource(url, contract), strategy.collate, PlanBook("offline", 1, 1), contract_hash=contract_hash(contract),
        prefetch=1, report_lost=lost.append,
    )  # fmt: skip
    loader.start()
    wanted = plan(prompts, contract, url)
    loader.offer(wanted)
    window = loader.next(0, lambda: bool(lost))
    loader.close()
    assert isinstance(window, Window), lost

    target = load_target(tiny_target, contract)
    for batch, micro_batch in zip(window.batches, wanted.micro_batches, strict=True):
        samples = []
        for ref in micro_batch.samples:
            (prompt,) = prompts.read([ref.attempt.task.prompt_index])
            sample = capture_one(target, prompt)
            assert sample.keys() == feature_table(contract).keys()
            samples.append(sample | {"visit": torch.tensor([1, prompt.index])})
        expected = strategy.collate(samples)
        assert batch.keys() == expected.keys()
        for key, tensor in expected.items():
            assert torch.equal(batch[key], tensor), key

        prepared = strategy.prepare(batch)
        numerators = strategy.objective(prepared).numerators
        terms = [strategy.term_weights[term] * numerators[term] / prepared.denominators[term] for term in numerators]
        loss = torch.stack(terms).sum()
        loss.backward()
        assert torch.isfinite(loss)
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in strategy.draft.parameters())
