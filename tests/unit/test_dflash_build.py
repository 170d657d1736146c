"""DFlash as a run builds it: from the recipe's section, the contract and the target's directory."""

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from fixtures.blocks import MASK

from specfleet.config.load import load_config
from specfleet.config.models import ModelSection, RunConfig
from specfleet.contracts.errors import ConfigError, ContractError
from specfleet.data.demo import demo_recipe
from specfleet.drafts.export import export_draft
from specfleet.target.facts import build_contract, read_target_facts
from specfleet.target.weights import load_embedding
from specfleet.trainer.strategies.dflash import DFlashStrategy
from specfleet.trainer.strategies.table import build_strategy

SMALL = {"num_layers": 3, "block_size": 4, "intermediate_size": 48, "mask_token_id": MASK}


def _build(target: Path, **section: Any) -> DFlashStrategy:
    recipe = load_config(demo_recipe().with_name("smollm2-dflash.yaml"))
    strategy = type(recipe.strategy)(**{**recipe.strategy.model_dump(), **SMALL, **section})
    config: RunConfig = recipe.model_copy(update={"strategy": strategy, "model": ModelSection(target=str(target))})
    contract = build_contract(config, read_target_facts(target))
    assert contract.final_state == "none"
    prompt_set = cast(Any, None)  # block drafts count no vocabulary
    torch.manual_seed(0)
    built = build_strategy(config, contract, target, prompt_set, 100, torch.device("cpu"), torch.float32)
    assert isinstance(built, DFlashStrategy)
    return built


def test_the_recipe_builds_a_draft_shaped_like_its_target(tiny_target: Path) -> None:
    strategy = _build(tiny_target)
    config = strategy.draft.config
    assert (config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (
        32,
        4,
        2,
        8,
    )
    assert (config.num_layers, config.block_size, config.mask_token_id, config.num_target_layers) == (3, 4, MASK, 6)
    assert config.layer_ids == (1, 2, 3)
    assert config.layer_types == ()
    assert strategy.draft.max_draft_tokens == 3
    # The target ties its matrices, and so are they held: once.
    assert strategy._head is strategy._embedding
    assert torch.equal(strategy._embedding, load_embedding(tiny_target).float())


def test_a_window_leaves_the_last_layer_its_full_view(tiny_target: Path) -> None:
    config = _build(tiny_target, sliding_window=32).draft.config
    assert config.layer_types == ("sliding_attention", "sliding_attention", "full_attention")
    assert [config.window_of(layer) for layer in range(3)] == [32, 32, None]
    assert _build(tiny_target, sliding_window=32, num_layers=1).draft.config.layer_types == ("sliding_attention",)


def test_a_target_without_a_free_token_needs_one_named(tiny_target: Path) -> None:
    with pytest.raises(ConfigError, match="all 384 embedding rows") as caught:
        _build(tiny_target, mask_token_id=None)
    assert caught.value.code == "SF-CONFIG-MASK-TOKEN"


def test_starts_from_an_export_and_takes_over_its_mask_token(tiny_target: Path, tmp_path: Path) -> None:
    first = _build(tiny_target).draft
    export_draft(first, "sglang", tmp_path, dtype=torch.float32)
    second = _build(tiny_target, init_from=str(tmp_path), mask_token_id=None).draft
    assert second.config.mask_token_id == MASK
    assert all(torch.equal(tensor, second.state_dict()[name]) for name, tensor in first.state_dict().items())
    for changes in ({"mask_token_id": MASK + 1}, {"layers": [0, 2, 4]}, {"num_layers": 2}):
        with pytest.raises(ContractError) as caught:
            _build(tiny_target, init_from=str(tmp_path), **changes)
        assert caught.value.code == "SF-INIT-CONFIG"
