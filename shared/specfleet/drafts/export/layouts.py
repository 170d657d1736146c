"""Export layouts: per draft architecture and serving engine, how config.json and tensor names look.

Layer ids are the trap here. Inside the project layer k means "output of decoder layer k". SGLang's `eagle_config` stores the
same number (and adds one itself, since it captures in front of a layer); vLLM's top-level field stores the layer *in front of
which* to capture, k + 1.
"""

from collections.abc import Mapping
from typing import Any

import torch

from specfleet.contracts.errors import ExportError
from specfleet.drafts.eagle3 import Eagle3Config
from specfleet.drafts.export.dflash import DFLASH_LAYOUTS
from specfleet.drafts.export.layout import Layout, parse_rope, rope_keys
from specfleet.drafts.export.tables import eagle3_table

_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


def find_layout(kind: str, engine: str) -> Layout:
    """Raises ExportError SF-EXPORT-LAYOUT."""
    for layout in LAYOUTS:
        if (layout.kind, layout.engine) == (kind, engine):
            return layout
    known = ", ".join(layout.engine for layout in LAYOUTS if layout.kind == kind) or "none"
    raise ExportError("SF-EXPORT-LAYOUT", f"a {kind} draft cannot be exported for {engine!r}; layouts of {kind}: {known}")


def detect_layout(config: Mapping[str, Any], where: str) -> Layout:
    """Raises ExportError SF-EXPORT-UNKNOWN."""
    found = [layout for layout in LAYOUTS if layout.matches(config)]
    if len(found) != 1:
        raise ExportError(
            "SF-EXPORT-UNKNOWN",
            f"{where} is not an export this project knows: architectures {config.get('architectures')}, and "
            f"{len(found)} layouts match. An EAGLE-3 export must name its layer ids, either in eagle_config.{_LAYER_IDS} "
            f"(SGLang) or in a top-level {_LAYER_IDS} (vLLM)",
        )
    return found[0]


def before_layer_ids(layer_ids: tuple[int, ...]) -> list[int]:
    """ "Output of layer k" → "in front of layer k + 1"."""
    return [layer + 1 for layer in layer_ids]


def output_layer_ids(before: list[int]) -> list[int]:
    """Inverse of before_layer_ids."""
    return [layer - 1 for layer in before]


def _eagle3_common(config: Eagle3Config, dtype: torch.dtype) -> dict[str, Any]:
    document: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "attention_bias": False,
        "mlp_bias": False,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "tie_word_embeddings": False,
        "max_position_embeddings": config.max_position_embeddings,
        **rope_keys(config.rope_theta, config.rope_scaling),
        "torch_dtype": str(dtype).removeprefix("torch."),
        "target_hidden_size": config.target_hidden_size,
        "num_aux_hidden_states": config.num_aux,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
    }
    return document


def _parse_eagle3(config: Mapping[str, Any], layer_ids: list[int]) -> dict[str, Any]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    return {
        "hidden_size": hidden,
        "intermediate_size": config["intermediate_size"],
        "num_attention_heads": heads,
        "num_key_value_heads": config.get("num_key_value_heads", heads),
        "head_dim": config.get("head_dim") or hidden // heads,
        "vocab_size": config["vocab_size"],
        "draft_vocab_size": config.get("draft_vocab_size") or config["vocab_size"],
        "target_hidden_size": config.get("target_hidden_size") or hidden,
        "layer_ids": layer_ids,
        "max_position_embeddings": config.get("max_position_embeddings", 2048),
        "rms_norm_eps": config.get("rms_norm_eps", 1e-5),
        **parse_rope(config),
        "fc_norm": bool(config.get("fc_norm", False)),
        "norm_output": bool(config.get("norm_output", False)),
    }


def _is_eagle3(config: Mapping[str, Any]) -> bool:
    return config.get("architectures") == ["LlamaForCausalLMEagle3"]


_EAGLE3_SGLANG = Layout(
    kind="eagle3",
    engine="sglang",
    describe=lambda config, dtype: {
        **_eagle3_common(config, dtype),
        "eagle_config": {"use_aux_hidden_state": True, _LAYER_IDS: list(config.layer_ids)},
    },
    parse=lambda config: _parse_eagle3(config, list(config["eagle_config"][_LAYER_IDS])),
    matches=lambda config: _is_eagle3(config) and _LAYER_IDS in (config.get("eagle_config") or {}),
    # SGLang always installs the target's embedding.
    table=lambda config: eagle3_table(config, "midlayer", embedding=False),
)

_EAGLE3_VLLM = Layout(
    kind="eagle3",
    engine="vllm",
    describe=lambda config, dtype: {
        **_eagle3_common(config, dtype),
        _LAYER_IDS: before_layer_ids(config.layer_ids),
        "norm_before_residual": False,
    },
    parse=lambda config: _parse_eagle3(config, output_layer_ids(list(config[_LAYER_IDS]))),
    matches=lambda config: _is_eagle3(config) and _LAYER_IDS in config and "eagle_config" not in config,
    table=lambda config: eagle3_table(config, "layers.0", embedding=True),
    renames=(("midlayer.", "layers.0."),),
)

LAYOUTS: tuple[Layout, ...] = (_EAGLE3_SGLANG, _EAGLE3_VLLM, *DFLASH_LAYOUTS)
