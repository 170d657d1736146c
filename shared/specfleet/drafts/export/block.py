"""What the exports of block drafts share: configuration keys and the loader table of the backbone.

Engines agree on the layer ids here: `dflash_config.target_layer_ids` are outputs of decoder layers for SGLang and vLLM alike.
"""

from collections.abc import Mapping
from typing import Any

import torch

from specfleet.contracts.errors import ExportError
from specfleet.drafts.block import BlockConfig
from specfleet.drafts.export.decoder import describe_sizes, layer_table, parse_sizes
from specfleet.drafts.export.tables import Expected, Table


def describe_backbone(config: BlockConfig, dtype: torch.dtype, architecture: str) -> dict[str, Any]:
    """config.json of the backbone, with the part every engine reads of `dflash_config`."""
    layer_types = config.layer_types or ("full_attention",) * config.num_layers
    sliding = "sliding_attention" in layer_types
    return {
        "architectures": [architecture],
        "model_type": "qwen3",
        **describe_sizes(config, dtype),
        "num_hidden_layers": config.num_layers,
        "num_target_layers": config.num_target_layers,
        "block_size": config.block_size,
        "layer_types": list(layer_types),
        "use_sliding_window": sliding,
        "sliding_window": config.sliding_window if sliding else None,
        # transformers derives layer types from it where it does not read them.
        "max_window_layers": config.num_layers,
        "attention_dropout": 0.0,
        "dflash_config": {"mask_token_id": config.mask_token_id, "target_layer_ids": list(config.layer_ids)},
    }


def parse_backbone(config: Mapping[str, Any]) -> dict[str, Any]:
    """Draft config of a config.json. Raises ExportError SF-EXPORT-UNKNOWN when it leaves out what cannot be guessed."""
    nested = config.get("dflash_config") or {}

    def need(name: str) -> Any:
        value = nested.get(name, config.get(name))
        if value is None:
            raise ExportError(
                "SF-EXPORT-UNKNOWN",
                f"a block draft's config.json must name {name}, in dflash_config or at the top level",
            )
        return value

    types = list(config.get("layer_types") or []) if config.get("use_sliding_window", True) else []
    if set(types) <= {"full_attention"}:
        types = []
    return {
        **parse_sizes(config, default_eps=1e-6),
        "num_layers": config["num_hidden_layers"],
        "block_size": need("block_size"),
        "layer_ids": list(need("target_layer_ids")),
        "mask_token_id": need("mask_token_id"),
        "num_target_layers": need("num_target_layers"),
        "layer_types": types,
        "sliding_window": (config.get("sliding_window") or 0) if types else 0,
    }


def backbone_table(config: Mapping[str, Any], *, embedding: bool = False) -> Table:
    """Tensors of the backbone for a config.json. embedding: the loader takes the target's, and may find a copy here."""
    hidden = config["hidden_size"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    nested = config.get("dflash_config") or {}
    num_aux = len(nested.get("target_layer_ids") or config.get("target_layer_ids") or ())
    table = {
        "fc.weight": Expected((hidden, num_aux * hidden)),
        "hidden_norm.weight": Expected((hidden,)),
        "norm.weight": Expected((hidden,)),
    }
    for index in range(config["num_hidden_layers"]):
        prefix = f"layers.{index}"
        table |= layer_table(config, prefix, hidden)
        table |= {f"{prefix}.self_attn.{name}.weight": Expected((head_dim,)) for name in ("q_norm", "k_norm")}
    if embedding:
        table["embed_tokens.weight"] = Expected((config["vocab_size"], hidden), required=False)
    return table
