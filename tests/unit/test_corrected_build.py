"""Domino and DSpark as a run builds them: from the recipe's section, the contract and the target's directory."""

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from fixtures.blocks import MASK
from safetensors.torch import load_file, save_file

from specfleet.config.load import load_config
from specfleet.config.models import ModelSection, RunConfig
from specfleet.contracts.errors import ConfigError, ContractError
from specfleet.data.demo import demo_recipe
from specfleet.drafts.export import export_draft
from specfleet.target.facts import build_contract, read_target_facts
from specfleet.trainer.strategies.base import Strategy
from specfleet.trainer.strategies.domino import DominoStrategy
from specfleet.trainer.strategies.table import build_strategy
from specfleet.wire.records_pb2 import CaptureContract

HEADS = ("prefix_gru.", "embed_proj.", "markov_head.", "confidence_head.")
SMALL = {"num_layers": 2, "block_size": 4, "intermediate_size": 48, "mask_token_id": MASK}


def _config(name: str, target: Path, **section: Any) -> RunConfig:
    recipe = load_config(demo_recipe().with_name(f"smollm2-{name}.yaml"))
    strategy = type(recipe.strategy)(**{**recipe.strategy.model_dump(), **SMALL, **section})
    return recipe.model_copy(update={"strategy": strategy, "model": ModelSection(target=str(target))})


def _build(config: RunConfig, target: Path, contract: CaptureContract | None = None) -> Strategy:
    contract = contract or build_contract(config, read_target_facts(target))
    prompt_set = cast(Any, None)  # block drafts count no vocabulary
    return build_strategy(config, contract, target, prompt_set, 100, torch.device("cpu"), torch.float32)


@pytest.mark.parametrize(("name", "final_state", "guesses"), [("domino", "none", 3), ("dspark", "post_norm", 4)])
def test_a_recipe_builds(tiny_target: Path, name: str, final_state: str, guesses: int) -> None:
    config = _config(name, tiny_target)
    contract = build_contract(config, read_target_facts(tiny_target))
    assert contract.final_state == final_state
    strategy = _build(config, tiny_target)
    assert strategy.draft.kind == strategy.identity()["strategy"] == name
    assert strategy.draft.max_draft_tokens == guesses
    assert strategy.draft.config.mask_token_id == MASK
    if isinstance(strategy, DominoStrategy):
        strategy.begin_step(26)
        assert strategy.base_weight == pytest.approx(0.5)


def test_dspark_needs_the_final_state(tiny_target: Path) -> None:
    config = _config("dspark", tiny_target)
    contract = build_contract(config, read_target_facts(tiny_target))
    contract.final_state = "none"
    with pytest.raises(ConfigError, match="dspark needs final_state post_norm") as caught:
        _build(config, tiny_target, contract)
    assert caught.value.code == "SF-CONFIG-FINAL-STATE"


@pytest.mark.parametrize("name", ["domino", "dspark"])
def test_a_run_starts_from_an_export(tiny_target: Path, tmp_path: Path, name: str) -> None:
    first = _build(_config(name, tiny_target), tiny_target).draft
    export_draft(first, "sglang", tmp_path / "out", dtype=torch.float32)
    weights = tmp_path / "out" / "model.safetensors"
    old = {f"logit_head.{key}" if key.startswith(HEADS) else key: tensor for key, tensor in load_file(weights).items()}
    assert any(key.startswith("logit_head.") for key in old)
    save_file(old, weights)  # as trainers named them once
    second = _build(_config(name, tiny_target, init_from=str(tmp_path / "out")), tiny_target).draft
    assert all(torch.equal(second.state_dict()[key], tensor) for key, tensor in first.state_dict().items())


def test_a_start_from_the_other_label_convention_is_refused(tiny_target: Path, tmp_path: Path) -> None:
    """Every tensor would fit, and every guess would be off by one."""
    first = _build(_config("domino", tiny_target, shift_label=True), tiny_target).draft
    export_draft(first, "sglang", tmp_path / "out", dtype=torch.float32)
    other = _config("domino", tiny_target, shift_label=False, init_from=str(tmp_path / "out"))
    with pytest.raises(ContractError, match="shift_label True, this run's draft has False") as caught:
        _build(other, tiny_target)
    assert caught.value.code == "SF-INIT-CONFIG"
