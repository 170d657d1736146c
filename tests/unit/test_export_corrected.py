"""Exports of Domino and DSpark: golden names, shapes and config keys; what is imported, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.corrected import tiny_domino, tiny_dspark
from safetensors.torch import load_file, save_file

from specfleet.contracts.errors import ExportError
from specfleet.drafts.base import Draft
from specfleet.drafts.export import export_draft, load_export

BACKBONE = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "num_hidden_layers": 2, "num_target_layers": 6, "vocab_size": 384, "model_type": "qwen3",
    "layer_types": ["full_attention", "full_attention"], "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip


def _config(folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return document


def _rewrite(folder: Path, **changes: Any) -> None:
    """Top-level keys, and dflash_config merged; None removes a key."""
    document = _config(folder)
    nested = {**document["dflash_config"], **changes.pop("dflash_config", {})}
    document = {**document, **changes, "dflash_config": {k: v for k, v in nested.items() if v is not None}}
    (folder / "config.json").write_text(json.dumps({k: v for k, v in document.items() if v is not None}))


def _heads(folder: Path) -> dict[str, list[int]]:
    """Tensors beyond the backbone."""
    tensors = load_file(folder / "model.safetensors")
    own = ("fc.", "hidden_norm.", "norm.", "layers.")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    return {name: list(tensor.shape) for name, tensor in tensors.items() if not name.startswith(own)}


@pytest.mark.parametrize("shift", [False, True])
def test_domino_for_sglang(tmp_path: Path, shift: bool) -> None:
    export_draft(tiny_domino(shift=shift), "sglang", tmp_path / "out")
    config = _config(tmp_path / "out")
    assert BACKBONE.items() <= config.items()
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["block_size"] == 5
    assert config["dflash_config"] == {
        "mask_token_id": 7,
        "target_layer_ids": [1, 2, 3],
        "projector_type": "domino",
        "shift_label": shift,
        "pure_draft_prefix_len": 1,
        "gru_hidden_dim": 12,
        "emb_dim": 6,
    }
    assert _heads(tmp_path / "out") == {
        "prefix_gru.weight_ih_l0": [36, 32],
        "prefix_gru.weight_hh_l0": [36, 12],
        "embed_proj.0.weight": [6, 44],
        "embed_proj.2.weight": [384, 6],
    }


MARKOV_SHAPES: dict[str, dict[str, list[int]]] = {
    "vanilla": {},
    "gated": {"markov_head.gate_proj.weight": [6, 38], "markov_head.gate_proj.bias": [6]},
    "rnn": {"markov_head.joint_proj.weight": [18, 44], "markov_head.joint_proj.bias": [18]},
}


@pytest.mark.parametrize("kind", MARKOV_SHAPES)
def test_dspark_for_sglang(tmp_path: Path, kind: str) -> None:
    export_draft(tiny_dspark(markov_head=kind), "sglang", tmp_path / "out")
    config = _config(tmp_path / "out")
    heads = {
        "markov_rank": 6,
        "markov_head_type": kind,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "sample_from_anchor": True,
    }
    assert (BACKBONE | heads).items() <= config.items()
    assert config["architectures"] == ["Qwen3DSparkModel"]
    assert config["block_size"] == 4
    assert config["dflash_config"] == {
        "mask_token_id": 7,
        "target_layer_ids": [1, 2, 3],
        "projector_type": "dspark",
        "attention_mode": "gqa",
        **heads,
    }
    assert _heads(tmp_path / "out") == {
        "markov_head.markov_w1.weight": [384, 6],
        "markov_head.markov_w2.weight": [384, 6],
        "confidence_head.proj.weight": [1, 38],
        "confidence_head.proj.bias": [1],
        **MARKOV_SHAPES[kind],
    }


def test_dspark_for_vllm(tmp_path: Path) -> None:
    export_draft(tiny_dspark(), "vllm", tmp_path / "out")
    config = _config(tmp_path / "out")
    assert (config["target_layer_ids"], config["mask_token_id"], config["markov_rank"]) == ([1, 2, 3], 7, 6)
    assert config["architectures"] == ["Qwen3DSparkModel"]
    with pytest.raises(ExportError, match="a gated head"):
        export_draft(tiny_dspark(markov_head="gated"), "vllm", tmp_path / "gated")
    sliding = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
    with pytest.raises(ExportError, match="sliding layers"):
        export_draft(tiny_dspark(**sliding), "vllm", tmp_path / "sliding")


def test_heads_that_share_keys_with_every_query_say_so(tmp_path: Path) -> None:
    export_draft(tiny_dspark(num_key_value_heads=4), "sglang", tmp_path / "out")
    assert _config(tmp_path / "out")["dflash_config"]["attention_mode"] == "mha"


def test_vllm_does_not_serve_domino(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="vLLM does not serve Domino; layouts of domino: sglang"):
        export_draft(tiny_domino(), "vllm", tmp_path / "out")


# Makers of drafts and the engine each is exported for.
DRAFTS: dict[str, tuple[Callable[[], Draft], str]] = {
    "domino": (lambda: tiny_domino(shift=True), "sglang"),
    "dspark": (lambda: tiny_dspark(markov_head="rnn", confidence_with_markov=False), "sglang"),
    "dspark-bare": (lambda: tiny_dspark(confidence_head=False), "vllm"),
}


@pytest.mark.parametrize("name", DRAFTS)
def test_round_trip(tmp_path: Path, name: str) -> None:
    make, layout = DRAFTS[name]
    draft = make()
    exported = export_draft(draft, layout, tmp_path / "out", dtype=torch.float32)
    loaded = load_export(tmp_path / "out")
    assert loaded.config == draft.config
    assert all(torch.equal(loaded.state_dict()[key], tensor) for key, tensor in draft.state_dict().items())
    assert export_draft(loaded, layout, tmp_path / "again", dtype=torch.float32).weights_hash == exported.weights_hash


@pytest.mark.parametrize(("name", "architecture"), [("domino", "DominoDraftModel"), ("dspark", "DSparkDraftModel")])
def test_what_trainers_wrote_before_it_was_served_is_read(tmp_path: Path, name: str, architecture: str) -> None:
    """Their own class name, head weights under logit_head, keys only in dflash_config."""
    make, layout = DRAFTS[name]
    draft = make()
    export_draft(draft, layout, tmp_path / "out", dtype=torch.float32)
    heads = ("prefix_gru.", "embed_proj.", "markov_head.", "confidence_head.")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    save_file(
        {f"logit_head.{key}" if key.startswith(heads) else key: tensor for key, tensor in tensors.items()},
        tmp_path / "out" / "model.safetensors",
    )
    _rewrite(
        tmp_path / "out", architectures=[architecture], markov_rank=None, markov_head_type=None,
        enable_confidence_head=None, confidence_head_with_markov=None, sample_from_anchor=None,
    )  # fmt: skip
    loaded = load_export(tmp_path / "out")
    assert loaded.config == draft.config
    assert all(torch.equal(loaded.state_dict()[key], tensor) for key, tensor in draft.state_dict().items())


@pytest.mark.parametrize(
    ("name", "changes", "part"),
    [
        ("domino", {"dflash_config": {"shift_label": None}}, "shift_label is missing"),
        ("domino", {"dflash_config": {"pure_draft_prefix_len": 0}}, "pure_draft_prefix_len is 0"),
        ("domino", {"emb_dim": 5}, "emb_dim 5 contradicts"),
        ("dspark", {"markov_rank": None, "dflash_config": {"markov_rank": None}}, "markov_rank is missing"),
        ("dspark", {"markov_rank": 5}, "markov_rank is 5 at the top level and 6"),
        (
            "dspark",
            {"sample_from_anchor": False, "dflash_config": {"sample_from_anchor": None}},
            "sample_from_anchor is false",
        ),
    ],
)
def test_contradictory_configs_are_refused(tmp_path: Path, name: str, changes: dict[str, Any], part: str) -> None:
    make, layout = DRAFTS[name]
    draft = make()
    export_draft(draft, layout, tmp_path / "out")
    _rewrite(tmp_path / "out", **changes)
    with pytest.raises(ExportError, match=part) as caught:
        load_export(tmp_path / "out")
    assert caught.value.code == "SF-EXPORT-UNKNOWN"


def test_a_missing_head_is_refused(tmp_path: Path) -> None:
    export_draft(tiny_dspark(confidence_head=False), "sglang", tmp_path / "out")
    _rewrite(tmp_path / "out", enable_confidence_head=True, dflash_config={"enable_confidence_head": True})
    with pytest.raises(ExportError, match=r"missing confidence_head\.proj\.weight"):
        load_export(tmp_path / "out")
