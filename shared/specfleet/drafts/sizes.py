"""Sizes of a draft that follow its target: heads, rotary settings and norms, read from the target's config.json."""

from collections.abc import Mapping
from typing import Any


def decoder_sizes(text_config: Mapping[str, Any], intermediate_size: int = 0) -> dict[str, Any]:
    """Configuration keys every decoder-shaped draft shares. intermediate_size 0: the target's."""
    hidden, heads = int(text_config["hidden_size"]), int(text_config["num_attention_heads"])
    rope = dict(text_config.get("rope_parameters") or {})
    scaling = rope or dict(text_config.get("rope_scaling") or {})
    theta = float(scaling.pop("rope_theta", text_config.get("rope_theta") or 10000.0))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate_size or int(text_config["intermediate_size"]),
        "num_attention_heads": heads,
        "num_key_value_heads": int(text_config.get("num_key_value_heads") or heads),
        "head_dim": int(text_config.get("head_dim") or hidden // heads),
        "max_position_embeddings": int(text_config.get("max_position_embeddings") or 2048),
        "rms_norm_eps": float(text_config.get("rms_norm_eps") or 1e-5),
        "rope_theta": theta,
        "rope_scaling": None if kind == "default" else scaling,
    }
