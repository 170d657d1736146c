"""What every export says of its decoder layers: sizes and rotary settings in config.json, and the loader table of a layer."""

from collections.abc import Mapping
from typing import Any

import torch

from specfleet.drafts.config import DraftConfig
from specfleet.drafts.export.tables import Expected, Table


def describe_sizes(config: DraftConfig, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "attention_bias": False,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": False,
        "max_position_embeddings": config.max_position_embeddings,
        **_rope_keys(config.rope_theta, config.rope_scaling),
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def parse_sizes(config: Mapping[str, Any], default_eps: float) -> dict[str, Any]:
    """The same keys of a draft config; other trainers leave some of them out."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    return {
        "hidden_size": hidden,
        "intermediate_size": config["intermediate_size"],
        "num_attention_heads": heads,
        "num_key_value_heads": config.get("num_key_value_heads", heads),
        "head_dim": config.get("head_dim") or hidden // heads,
        "vocab_size": config["vocab_size"],
        "max_position_embeddings": config.get("max_position_embeddings", 2048),
        "rms_norm_eps": config.get("rms_norm_eps", default_eps),
        **_parse_rope(config),
    }


def layer_table(config: Mapping[str, Any], prefix: str, width: int) -> Table:
    """A decoder layer whose attention reads `width` numbers per row."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    kv_heads, inner = config.get("num_key_value_heads", heads), config["intermediate_size"]
    head_dim = config.get("head_dim") or hidden // heads
    return {
        f"{prefix}.input_layernorm.weight": Expected((hidden,)),
        f"{prefix}.post_attention_layernorm.weight": Expected((hidden,)),
        f"{prefix}.self_attn.q_proj.weight": Expected((heads * head_dim, width)),
        f"{prefix}.self_attn.k_proj.weight": Expected((kv_heads * head_dim, width)),
        f"{prefix}.self_attn.v_proj.weight": Expected((kv_heads * head_dim, width)),
        f"{prefix}.self_attn.o_proj.weight": Expected((hidden, heads * head_dim)),
        f"{prefix}.mlp.gate_proj.weight": Expected((inner, hidden)),
        f"{prefix}.mlp.up_proj.weight": Expected((inner, hidden)),
        f"{prefix}.mlp.down_proj.weight": Expected((hidden, inner)),
    }


def _rope_keys(theta: float, scaling: Mapping[str, Any] | None) -> dict[str, Any]:
    """Both schemas: engines built on transformers 4 read the first two keys, those on 5 the third."""
    plain = dict(scaling) if scaling else None
    return {
        "rope_theta": theta,
        "rope_scaling": plain,
        "rope_parameters": {"rope_type": "default", **(plain or {}), "rope_theta": theta},
    }


def _parse_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """rope_theta and rope_scaling (None: unscaled) of a draft config, from either schema."""
    rope = dict(config.get("rope_parameters") or {})
    scaling = rope or dict(config.get("rope_scaling") or {})
    theta = scaling.pop("rope_theta", config.get("rope_theta", 10000.0))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    return {"rope_theta": theta, "rope_scaling": None if kind == "default" else scaling}
