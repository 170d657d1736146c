"""Exports: names, config keys and layer ids per engine are fixed; anything that does not fit the loader table is refused."""

import json
from pathlib import Path

import pytest
import torch
from fixtures.checkpoints import write_checkpoint
from fixtures.eagle3 import tiny_draft
from safetensors.torch import load_file, save_file

from specfleet.config.features import eagle3_layers
from specfleet.config.serving import default_layout
from specfleet.contracts.errors import ConfigError, ContractError, DataError, ExportError
from specfleet.drafts.checkpoint import load_draft_checkpoint
from specfleet.drafts.eagle3 import Eagle3Config
from specfleet.drafts.export import LAYOUTS, export_draft, load_export, weights_hash, write_acceptance
from specfleet.drafts.export.eagle import before_layer_ids, output_layer_ids
from specfleet.drafts.registry import DRAFTS, untrained_like

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}  # fmt: skip

SGLANG_SHAPES = {
    "fc.weight": [32, 96],
    "midlayer.input_layernorm.weight": [32],
    "midlayer.hidden_norm.weight": [32],
    "midlayer.post_attention_layernorm.weight": [32],
    "midlayer.self_attn.q_proj.weight": [32, 64],
    "midlayer.self_attn.k_proj.weight": [16, 64],
    "midlayer.self_attn.v_proj.weight": [16, 64],
    "midlayer.self_attn.o_proj.weight": [32, 32],
    "midlayer.mlp.gate_proj.weight": [48, 32],
    "midlayer.mlp.up_proj.weight": [48, 32],
    "midlayer.mlp.down_proj.weight": [32, 48],
    "norm.weight": [32],
    "lm_head.weight": [128, 32],
    "d2t": [128],
    "t2d": [384],
}


def test_sglang_golden(tmp_path: Path) -> None:
    exported = export_draft(tiny_draft(), "sglang", tmp_path / "out")
    assert exported.files == ("README.md", "config.json", "model.safetensors")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: list(tensor.shape) for name, tensor in tensors.items()} == SGLANG_SHAPES
    assert {tensor.dtype for name, tensor in tensors.items() if name not in ("d2t", "t2d")} == {torch.bfloat16}
    assert (tensors["d2t"].dtype, tensors["t2d"].dtype) == (torch.int64, torch.bool)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "producer": "specfleet",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "mlp_bias": False,
        "vocab_size": 384,
        "draft_vocab_size": 128,
        "tie_word_embeddings": False,
        "max_position_embeddings": 2048,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "torch_dtype": "bfloat16",
        "target_hidden_size": 32,
        "num_aux_hidden_states": 3,
        "fc_norm": False,
        "norm_output": False,
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, 2, 4]},
    }


def test_vllm_golden(tmp_path: Path) -> None:
    export_draft(tiny_draft(), "vllm", tmp_path / "out")
    names = set(load_file(tmp_path / "out" / "model.safetensors"))
    assert names == {name.replace("midlayer.", "layers.0.") for name in SGLANG_SHAPES}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 3, 5]
    assert "eagle_config" not in config


def test_layer_ids_of_a_36_layer_target() -> None:
    assert before_layer_ids(eagle3_layers(36)) == [2, 18, 33]
    assert output_layer_ids([2, 18, 33]) == list(eagle3_layers(36)) == [1, 17, 32]


@pytest.mark.parametrize("layout", ["sglang", "vllm"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"fc_norm": True, "norm_output": True}, {"rope_scaling": LLAMA3, "rope_theta": 5e5}, {"head_dim": 16}],
    ids=["eagle3", "eagle3.1", "llama3-rope", "wide-heads"],
)
def test_round_trip(tmp_path: Path, layout: str, changes: dict[str, object]) -> None:
    draft = tiny_draft(**changes)
    exported = export_draft(draft, layout, tmp_path / "out", dtype=torch.float32)
    loaded = load_export(tmp_path / "out")
    assert loaded.config == draft.config
    for name, tensor in draft.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    assert export_draft(loaded, layout, tmp_path / "again", dtype=torch.float32).weights_hash == exported.weights_hash


def test_both_rope_schemas_are_written_and_either_is_read(tmp_path: Path) -> None:
    draft = tiny_draft(rope_scaling=LLAMA3, rope_theta=5e5)
    export_draft(draft, "sglang", tmp_path / "out")
    file = tmp_path / "out" / "config.json"
    config = json.loads(file.read_text())
    assert config["rope_scaling"] == LLAMA3
    assert config["rope_parameters"] == {**LLAMA3, "rope_theta": 5e5}
    for keys in (("rope_parameters",), ("rope_scaling", "rope_theta")):
        file.write_text(json.dumps({key: value for key, value in config.items() if key not in keys}))
        assert load_export(tmp_path / "out").config == draft.config


def test_every_difference_from_the_loader_table_is_listed(tmp_path: Path) -> None:
    export_draft(tiny_draft(), "sglang", tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    tensors = load_file(file)
    del tensors["norm.weight"]
    tensors["model.extra"] = torch.zeros(2)
    tensors["fc.weight"] = tensors["fc.weight"][:, :64].contiguous()
    tensors["d2t"] = tensors["d2t"].int()
    save_file(tensors, file)
    with pytest.raises(ExportError) as caught:
        load_export(tmp_path / "out")
    assert caught.value.code == "SF-EXPORT-TENSORS"
    for part in ("leftover model.extra", "missing norm.weight", "misshapen fc.weight: [32, 64], expected [32, 96]",
                 "mistyped d2t"):  # fmt: skip
        assert part in caught.value.message


def test_exporting_what_the_engine_would_not_load_is_refused(tmp_path: Path) -> None:
    draft = tiny_draft()
    draft.extra = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(ExportError, match="leftover extra"):
        export_draft(draft, "sglang", tmp_path / "out")
    with pytest.raises(ExportError, match=r"leftover embed_tokens\.weight"):
        export_draft(tiny_draft(), "sglang", tmp_path / "out", embedding_VH=torch.zeros(384, 32))
    export_draft(tiny_draft(), "vllm", tmp_path / "vllm", embedding_VH=torch.zeros(384, 32))
    assert not (tmp_path / "out").exists()


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    draft = tiny_draft()
    draft.norm.weight.data[3] = torch.nan
    with pytest.raises(ExportError, match=r"norm\.weight"):
        export_draft(draft, "sglang", tmp_path / "out")


def test_unless_asked_the_layout_is_one_that_is_served() -> None:
    for kind in DRAFTS:
        assert default_layout(kind) == next(layout.engine for layout in LAYOUTS if layout.kind == kind)
    assert default_layout("peagle") == "vllm"
    with pytest.raises(ConfigError, match=r"medusa.*eagle3, peagle"):
        default_layout("medusa")


def test_unknown_layouts_and_foreign_directories(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="sglang, vllm"):
        export_draft(tiny_draft(), "trt", tmp_path / "out")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "thesis.txt").write_text("mine")
    with pytest.raises(ExportError) as caught:
        export_draft(tiny_draft(), "sglang", tmp_path / "notes")
    assert caught.value.code == "SF-EXPORT-EXISTS"
    with pytest.raises(ExportError) as caught:
        load_export(tmp_path / "notes")
    assert caught.value.code == "SF-EXPORT-MISSING"
    export_draft(tiny_draft(), "sglang", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    sparse = {key: value for key, value in config.items() if key != "intermediate_size"}
    (tmp_path / "out" / "config.json").write_text(json.dumps(sparse))
    with pytest.raises(ExportError, match="does not say what 'intermediate_size' is"):
        load_export(tmp_path / "out")
    del config["eagle_config"]
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ExportError) as caught:
        load_export(tmp_path / "out")
    assert caught.value.code == "SF-EXPORT-UNKNOWN"


def test_an_export_replaces_an_earlier_one(tmp_path: Path) -> None:
    export_draft(tiny_draft(seed=1), "sglang", tmp_path / "out")
    second = export_draft(tiny_draft(seed=2), "vllm", tmp_path / "out")
    assert weights_hash(load_file(tmp_path / "out" / "model.safetensors")) == second.weights_hash
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_weights_hash_depends_on_every_byte_name_shape_and_dtype() -> None:
    base = {"a": torch.zeros(2, 2), "b": torch.ones(3)}
    others = [
        {"a": torch.zeros(4), "b": torch.ones(3)},
        {"a": torch.zeros(2, 2).int(), "b": torch.ones(3)},
        {"a": torch.zeros(2, 2), "c": torch.ones(3)},
        {"a": torch.zeros(2, 2), "b": torch.tensor([1.0, 1.0, 1.0000001])},
    ]
    hashes = [weights_hash(tensors) for tensors in (base, *others)]
    assert len(set(hashes)) == len(hashes)
    assert weights_hash(dict(reversed(base.items()))) == hashes[0]


def test_model_card(tmp_path: Path) -> None:
    exported = export_draft(
        tiny_draft(), "sglang", tmp_path / "out", facts={"prompt set": "abc123", "contract": "def456"}
    )
    card = (tmp_path / "out" / "README.md").read_text()
    for part in ("abc123", "def456", exported.weights_hash, "Not measured yet"):
        assert part in card
    for text in ("| gsm8k | 2.31 |", "| gsm8k | 2.40 |"):
        write_acceptance(tmp_path / "out", text)
        card = (tmp_path / "out" / "README.md").read_text()
        assert text in card
        assert "Not measured yet" not in card
    assert "2.31" not in card
    (tmp_path / "out" / "README.md").write_text("nothing")
    with pytest.raises(ExportError, match="no acceptance section"):
        write_acceptance(tmp_path / "out", "x")


def test_untrained_twin_shares_architecture_and_vocabulary_only() -> None:
    draft = tiny_draft()
    twin = untrained_like(draft, seed=5)
    assert twin.config == draft.config
    assert torch.equal(twin.get_buffer("d2t"), draft.d2t)
    assert not torch.equal(twin.get_parameter("fc.weight"), draft.fc.weight)
    assert torch.equal(untrained_like(draft, seed=5).get_parameter("fc.weight"), twin.get_parameter("fc.weight"))


def test_checkpoint_reader(tmp_path: Path) -> None:
    draft = tiny_draft(fc_norm=True)
    loaded, meta = load_draft_checkpoint(f"file://{write_checkpoint(tmp_path / 'good', draft, step=7)}")
    assert meta["step"] == 7
    assert isinstance(loaded.config, Eagle3Config)
    assert all(torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in draft.state_dict().items())
    for name, changes, code in (
        ("format", {"format": 2}, "SF-CHECKPOINT-FORMAT"),
        ("altered", {"files": {"draft.safetensors": "0" * 64}}, "SF-CHECKPOINT-CORRUPT"),
        ("other", {"draft": {"kind": "eagle3", "config": tiny_draft().config.to_dict()}}, "SF-CHECKPOINT-TENSORS"),
    ):
        with pytest.raises(ContractError) as caught:
            load_draft_checkpoint(write_checkpoint(tmp_path / name, draft, **changes))
        assert caught.value.code == code
    with pytest.raises(DataError, match="not a complete checkpoint"):
        load_draft_checkpoint(tmp_path / "absent")
