"""DFlash exports: golden config keys where each engine reads them, exact tensor names, round trips, refusals."""

import json
from pathlib import Path

import pytest
import torch
from fixtures.blocks import tiny_dflash
from safetensors.torch import load_file, save_file

from specfleet.contracts.errors import ConfigError, ExportError
from specfleet.drafts.dflash import DFlashDraft
from specfleet.drafts.export import export_draft, load_export

WINDOW = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7}
LAYER_TENSORS = {
    "input_layernorm": [32], "post_attention_layernorm": [32],
    "self_attn.q_proj": [32, 32], "self_attn.k_proj": [16, 32], "self_attn.v_proj": [16, 32], "self_attn.o_proj": [32, 32],
    "self_attn.q_norm": [8], "self_attn.k_norm": [8],
    "mlp.gate_proj": [48, 32], "mlp.up_proj": [48, 32], "mlp.down_proj": [32, 48],
}  # fmt: skip


def test_sglang_config(tmp_path: Path) -> None:
    export_draft(tiny_dflash(**WINDOW), "sglang", tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()) == {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_hidden_layers": 2,
        "num_target_layers": 6,
        "block_size": 5,
        "layer_types": ["sliding_attention", "full_attention"],
        "use_sliding_window": True,
        "sliding_window": 7,
        "max_window_layers": 2,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "vocab_size": 384,
        "tie_word_embeddings": False,
        "max_position_embeddings": 2048,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "torch_dtype": "bfloat16",
        "dflash_config": {"mask_token_id": 7, "target_layer_ids": [1, 2, 3]},
    }


def test_vllm_config_and_optional_embedding(tmp_path: Path) -> None:
    draft, embedding = tiny_dflash(), torch.randn(384, 32)
    export_draft(draft, "vllm", tmp_path, embedding_VH=embedding)
    config = json.loads((tmp_path / "config.json").read_text())
    # Unlike EAGLE's top-level field these are outputs of layers for vLLM too, which adds one itself.
    assert config["dflash_config"] == {"mask_token_id": 7, "target_layer_ids": [1, 2, 3], "use_aux_hidden_state": True}
    assert config["target_hidden_size"] == 32
    assert config["use_sliding_window"] is False
    assert config["sliding_window"] is None
    assert "embed_tokens.weight" in load_file(tmp_path / "model.safetensors")
    assert load_export(tmp_path).config == draft.config


@pytest.mark.parametrize("layout", ["sglang", "vllm"])
def test_exact_tensor_names(layout: str, tmp_path: Path) -> None:
    export_draft(tiny_dflash(), layout, tmp_path)
    shapes = {name: list(tensor.shape) for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    expected = {"fc.weight": [32, 96], "hidden_norm.weight": [32], "norm.weight": [32]}
    for layer in range(2):
        expected |= {f"layers.{layer}.{name}.weight": shape for name, shape in LAYER_TENSORS.items()}
    assert shapes == expected


@pytest.mark.parametrize("changes", [{}, WINDOW, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}])
def test_round_trip(changes: dict[str, object], tmp_path: Path) -> None:
    draft = tiny_dflash(seed=2, **changes)
    export_draft(draft, "sglang", tmp_path, dtype=torch.float32)
    loaded = load_export(tmp_path)
    assert isinstance(loaded, DFlashDraft)
    assert loaded.config == draft.config
    assert all(torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in draft.state_dict().items())


def test_sizes_nested_or_at_the_top(tmp_path: Path) -> None:
    """SGLang looks into dflash_config first; other trainers write either place."""
    draft = tiny_dflash()
    export_draft(draft, "sglang", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["dflash_config"] |= {name: config.pop(name) for name in ("block_size", "num_target_layers")}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_export(tmp_path).config == draft.config
    del config["dflash_config"]["mask_token_id"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ExportError, match="must name mask_token_id"):
        load_export(tmp_path)


@pytest.mark.parametrize("how", ["missing", "leftover", "misshapen"])
def test_tensors_must_match_exactly(how: str, tmp_path: Path) -> None:
    export_draft(tiny_dflash(), "sglang", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    match how:
        case "missing":
            del tensors["layers.1.self_attn.q_norm.weight"]
        case "leftover":
            tensors["lm_head.weight"] = torch.zeros(384, 32)
        case "misshapen":
            tensors["fc.weight"] = torch.zeros(32, 64)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ExportError, match=how) as caught:
        load_export(tmp_path)
    assert caught.value.code == "SF-EXPORT-TENSORS"


def test_what_an_engine_cannot_serve_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="sliding"):
        export_draft(tiny_dflash(**WINDOW), "vllm", tmp_path)
    with pytest.raises(ExportError, match="own position"):
        export_draft(tiny_dflash(sample_from_anchor=True), "sglang", tmp_path)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask_token_id": 384}, "mask_token_id"),
        ({"block_size": 1}, "block_size"),
        ({"layer_types": ["sliding_attention"] * 2, "sliding_window": 4}, "sliding_window"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"colour": 1}, "colour"),
    ],
)
def test_a_config_that_contradicts_itself(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        tiny_dflash(**changes)
    assert caught.value.code == "SF-DRAFT-CONFIG"


def test_guessing_needs_the_targets_head() -> None:
    with pytest.raises(ConfigError) as caught:
        tiny_dflash().drafter(torch.zeros(384, 32))
    assert caught.value.code == "SF-DRAFT-HEAD"
