"""Sizes of a draft that follow its target: heads, MLP width, rotary settings and norms, read from the target's text config.

A draft is made of plain decoder layers (grouped-query attention, dense MLP), and its target need not be. Where the target's
numbers do not describe such a layer, the rules of this file decide, for every strategy alike.
"""

from collections.abc import Mapping
from typing import Any, TypeGuard

from specfleet.contracts.errors import ConfigError

# The widest head every attention kernel of the serving engines runs well.
_HEAD_DIM = 128
# A draft decodes one sequence position at a time and reads its whole cache for it: few key-value heads keep that cheap.
_KEY_VALUE_HEADS = 8


def decoder_sizes(text_config: Mapping[str, Any], intermediate_size: int = 0) -> dict[str, Any]:
    """Configuration keys every decoder-shaped draft shares. intermediate_size 0: from the target.

    Raises ConfigError SF-DRAFT-SIZES when the target states no hidden size or no MLP width.
    """
    if not _positive(text_config.get("hidden_size")):
        raise ConfigError("SF-DRAFT-SIZES", f"the target's hidden_size is {text_config.get('hidden_size')!r}")
    hidden = int(text_config["hidden_size"])
    heads, key_value_heads, head_dim = _heads(text_config, hidden)
    theta, scaling = _rotary(text_config)
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate_size or _mlp_width(text_config),
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads,
        "head_dim": head_dim,
        "max_position_embeddings": int(text_config.get("max_position_embeddings") or 2048),
        "rms_norm_eps": float(text_config.get("rms_norm_eps") or 1e-5),
        "rope_theta": theta,
        "rope_scaling": scaling,
    }


def _heads(text_config: Mapping[str, Any], hidden: int) -> tuple[int, int, int]:
    """Query heads, key-value heads and head size: the target's, where a plain layer can have them.

    It cannot with latent attention (MLA), where `head_dim` is only the rotated part of a key; without an equal size for every
    head; or with heads of an odd size, which cannot be rotated. Then heads of the largest power of two up to 128 that divides
    the hidden size fill it, and the key-value heads are the largest number up to 8 that divides theirs.
    """
    heads = text_config.get("num_attention_heads")
    key_value_heads = text_config.get("num_key_value_heads") or heads
    latent = text_config.get("kv_lora_rank") is not None
    if not latent and _positive(heads) and _positive(key_value_heads) and heads % key_value_heads == 0:
        head_dim = text_config.get("head_dim") or (hidden // heads if hidden % heads == 0 else None)
        if _positive(head_dim) and head_dim % 2 == 0:
            return heads, key_value_heads, head_dim
    head_dim = _HEAD_DIM
    while hidden % head_dim:
        head_dim //= 2
    if head_dim < 2:
        raise ConfigError("SF-DRAFT-SIZES", f"the target's hidden_size {hidden} is odd: no rotary heads fit it")
    heads = hidden // head_dim
    return heads, max(n for n in range(1, _KEY_VALUE_HEADS + 1) if heads % n == 0), head_dim


def _mlp_width(text_config: Mapping[str, Any]) -> int:
    """What one token passes through: the dense MLP where the target states one, else the experts chosen for a token.

    Mixture-of-experts configs with a `moe_intermediate_size` keep `intermediate_size` for dense layers; in the others
    (Mixtral, GPT-OSS) it is the width of one expert.
    """
    dense, expert = text_config.get("intermediate_size"), text_config.get("moe_intermediate_size")
    chosen = text_config.get("num_experts_per_tok") or text_config.get("experts_per_token") or 1
    num_experts = text_config.get("num_local_experts") or text_config.get("num_experts") or 0
    if _positive(dense):
        return dense * chosen if num_experts and not expert else dense
    if _positive(expert):
        return expert * chosen
    raise ConfigError(
        "SF-DRAFT-SIZES",
        f"the target's intermediate_size is {dense!r}, so its draft's MLP has no default width; set strategy.intermediate_size",
    )


def _rotary(text_config: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """Rotary base, and scaling (None: unscaled). Of targets with one rotation per kind of layer, that of full attention.

    A draft rotates whole heads, whatever share its target rotates. YaRN's `mscale` pair is dropped: it belongs to the softmax
    scale of latent attention, and engines do not read it for plain layers.
    """
    rope = dict(text_config.get("rope_parameters") or {}) or dict(text_config.get("rope_scaling") or {})
    if rope and all(isinstance(value, Mapping) for value in rope.values()):
        rope = dict(rope.get("full_attention") or next(iter(rope.values())))
    theta = float(rope.pop("rope_theta", None) or text_config.get("rope_theta") or 10000.0)
    for name in ("partial_rotary_factor", "mscale", "mscale_all_dim"):
        rope.pop(name, None)
    kind = rope.get("rope_type", rope.get("type", "default"))
    return theta, None if kind == "default" else rope


def _positive(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
