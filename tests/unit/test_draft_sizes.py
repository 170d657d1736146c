"""Sizes of a draft follow its target where a plain decoder layer can have them, and rules where it cannot."""

import json
from pathlib import Path
from typing import Any

import pytest

from specfleet.contracts.errors import ConfigError
from specfleet.drafts.sizes import decoder_sizes
from specfleet.target.facts import read_text_facts
from specfleet.target.weights import read_text_config

DEEPSEEK_V3: dict[str, Any] = {
    "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_attention_heads": 128,
    "num_key_value_heads": 128, "kv_lora_rank": 512, "n_routed_experts": 256, "num_experts_per_tok": 8,
    "rope_theta": 10000,
    "rope_scaling": {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
                     "original_max_position_embeddings": 4096},
}  # fmt: skip
GPT_OSS: dict[str, Any] = {
    "hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
    "num_local_experts": 128, "experts_per_token": 4, "num_experts_per_tok": 4,
}  # fmt: skip
QWEN3_MOE: dict[str, Any] = {
    "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
}  # fmt: skip
GLM_45: dict[str, Any] = {
    "hidden_size": 5120, "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_attention_heads": 96,
    "num_key_value_heads": 8, "head_dim": 128, "n_routed_experts": 160, "num_experts_per_tok": 8,
}  # fmt: skip


def shape(text_config: dict[str, Any]) -> tuple[int, int, int, int]:
    sizes = decoder_sizes(text_config)
    return sizes["num_attention_heads"], sizes["num_key_value_heads"], sizes["head_dim"], sizes["intermediate_size"]


@pytest.mark.parametrize(
    ("text_config", "expected"),
    [
        (DEEPSEEK_V3, (56, 8, 128, 18432)),
        (GPT_OSS, (64, 8, 64, 4 * 2880)),
        (QWEN3_MOE, (32, 4, 128, 6144)),
        (GLM_45, (96, 8, 128, 12288)),
        ({**QWEN3_MOE, "intermediate_size": None}, (32, 4, 128, 8 * 768)),
    ],
    ids=["deepseek-v3", "gpt-oss", "qwen3-moe", "glm-4.5", "no-dense-mlp"],
)
def test_sizes_of_known_targets(text_config: dict[str, Any], expected: tuple[int, ...]) -> None:
    assert shape(text_config) == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (12, 4, 8)),
        ({"num_key_value_heads": None}, (12, 12, 8)),
        ({"head_dim": 16}, (12, 4, 16)),
        ({"head_dim": 9}, (3, 3, 32)),
        ({"num_attention_heads": 10}, (3, 3, 32)),
        ({"num_key_value_heads": 5}, (3, 3, 32)),
        ({"num_attention_heads": [12, 10]}, (3, 3, 32)),
        ({"num_attention_heads": None}, (3, 3, 32)),
        ({"hidden_size": 2880, "num_attention_heads": 7}, (45, 5, 64)),
    ],
    ids=["as-is", "mha", "wide", "odd", "indivisible", "ungrouped", "per-layer", "none", "gcd"],
)
def test_heads(changes: dict[str, Any], expected: tuple[int, int, int]) -> None:
    base = {"hidden_size": 96, "intermediate_size": 64, "num_attention_heads": 12, "num_key_value_heads": 4}
    assert shape({**base, **changes})[:3] == expected


def test_rotary_settings_of_both_schemas_and_of_two_rotations() -> None:
    base = {"hidden_size": 96, "intermediate_size": 64, "num_attention_heads": 12}
    old = decoder_sizes(DEEPSEEK_V3)
    assert old["rope_theta"] == 10000.0
    assert old["rope_scaling"] == {
        "type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 4096,
    }  # fmt: skip
    partial = {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5}
    new = decoder_sizes({**base, "rope_parameters": partial})
    assert (new["rope_theta"], new["rope_scaling"]) == (5e5, None)
    linear = {"rope_type": "linear", "factor": 8.0}
    both = {
        "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
        "full_attention": {"rope_theta": 1e6, **linear},
    }
    two = decoder_sizes({**base, "rope_parameters": both})
    assert (two["rope_theta"], two["rope_scaling"]) == (1e6, linear)
    assert "partial_rotary_factor" in partial  # the target's config is not changed
    assert "rope_theta" in both["full_attention"]


def test_what_has_no_default_is_refused_with_what_to_set() -> None:
    base = {"hidden_size": 96, "num_attention_heads": 12}
    with pytest.raises(ConfigError, match=r"SF-DRAFT-SIZES.*set strategy\.intermediate_size"):
        decoder_sizes(base)
    assert decoder_sizes(base, intermediate_size=40)["intermediate_size"] == 40
    with pytest.raises(ConfigError, match="no rotary heads fit"):
        decoder_sizes({"hidden_size": 97, "intermediate_size": 64})
    with pytest.raises(ConfigError, match="hidden_size is None"):
        decoder_sizes({})


def test_a_sparse_section_of_a_multimodal_target_is_completed(tmp_path: Path) -> None:
    """As Gemma 3 4B states it: no vocabulary, no heads, and a rotation in the old schema."""
    text = {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    }  # fmt: skip
    document = {
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "eos_token_id": [1, 106],
        "text_config": text, "tie_word_embeddings": False,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(document))
    facts = read_text_facts(tmp_path)
    assert facts.vocab_size == 262208
    assert set(facts.eos_token_ids) >= {1, 106}
    config = read_text_config(tmp_path)
    assert config["tie_word_embeddings"] is False
    assert shape(config) == (8, 4, 256, 10240)
    sizes = decoder_sizes(config)
    assert (sizes["rope_theta"], sizes["rope_scaling"]) == (1e6, {"rope_type": "linear", "factor": 8.0})
