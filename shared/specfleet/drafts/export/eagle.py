"""EAGLE-3 for SGLang and vLLM, P-EAGLE for vLLM. All are `LlamaForCausalLMEagle3` there.

Layer ids are the trap here. Inside the project layer k means "output of decoder layer k". SGLang's `eagle_config` stores the
same number (and adds one itself, since it captures in front of a layer); vLLM's top-level field stores the layer *in front of
which* to capture, k + 1.
"""

from collections.abc import Mapping
from typing import Any

import torch

from specfleet.contracts.errors import ExportError
from specfleet.drafts.eagle3 import Eagle3Config
from specfleet.drafts.eagle_base import EagleSizes
from specfleet.drafts.export.decoder import describe_sizes, layer_table, parse_sizes
from specfleet.drafts.export.layout import Layout
from specfleet.drafts.export.tables import Expected, Table
from specfleet.drafts.peagle import PEagleConfig
from specfleet.drafts.warm_start import PRODUCER

_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_ARCHITECTURE = "LlamaForCausalLMEagle3"


def before_layer_ids(layer_ids: tuple[int, ...]) -> list[int]:
    """ "Output of layer k" → "in front of layer k + 1"."""
    return [layer + 1 for layer in layer_ids]


def output_layer_ids(before: list[int]) -> list[int]:
    """Inverse of before_layer_ids."""
    return [layer - 1 for layer in before]


def _describe(sizes: EagleSizes, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "architectures": [_ARCHITECTURE],
        "model_type": "llama",
        "producer": PRODUCER,
        **describe_sizes(sizes, dtype),
        "num_hidden_layers": 1,
        "mlp_bias": False,
        "draft_vocab_size": sizes.draft_vocab_size,
        "target_hidden_size": sizes.target_hidden_size,
        "num_aux_hidden_states": sizes.num_aux,
    }


def _parse(config: Mapping[str, Any], layer_ids: list[int]) -> dict[str, Any]:
    return {
        **parse_sizes(config, default_eps=1e-5),
        "draft_vocab_size": config.get("draft_vocab_size") or config["vocab_size"],
        "target_hidden_size": config.get("target_hidden_size") or config["hidden_size"],
        "layer_ids": layer_ids,
    }


def _describe_eagle3(config: Eagle3Config, dtype: torch.dtype) -> dict[str, Any]:
    if config.legacy_v030 or config.experts:
        what = (
            "the norm placement of SpecForge v0.3.0 (strategy.legacy_v030)"
            if config.legacy_v030
            else (f"{config.experts} experts (strategy.experts)")
        )
        raise ExportError(
            "SF-EXPORT-UNSERVED", f"no engine serves EAGLE-3 drafts with {what}; train without it to export"
        )
    return {
        **_describe(config, dtype),
        # null: the engine installs the target's head. vLLM falls back to vocab_size and, without lm_head, to the same head.
        "draft_vocab_size": config.draft_vocab_size if config.own_head else None,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
    }


def _parse_eagle3(config: Mapping[str, Any], layer_ids: list[int]) -> dict[str, Any]:
    return {
        **_parse(config, layer_ids),
        "own_head": config.get("draft_vocab_size") is not None,
        "fc_norm": bool(config.get("fc_norm", False)),
        "norm_output": bool(config.get("norm_output", False)),
    }


def _describe_peagle(config: PEagleConfig, dtype: torch.dtype) -> dict[str, Any]:
    if config.num_aux != 3:
        raise ExportError(
            "SF-EXPORT-UNSERVED",
            f"vLLM's P-EAGLE reads three captured layers, this draft {config.num_aux}: {list(config.layer_ids)}. "
            "Train with three strategy.layers",
        )
    return {
        **_describe(config, dtype),
        "num_hidden_layers": config.num_layers,
        "norm_before_residual": config.norm_before_residual,
        "parallel_drafting": True,
        # Two spellings of the placeholder token; releases of vLLM differ in which they read first.
        "pard_token": config.mask_token_id,
        "ptd_token_id": config.mask_token_id,
        "num_depths": config.num_depths,
        _LAYER_IDS: before_layer_ids(config.layer_ids),
    }


def _parse_peagle(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **_parse(config, output_layer_ids(list(config[_LAYER_IDS]))),
        "num_layers": config["num_hidden_layers"],
        "num_depths": config["num_depths"],
        "mask_token_id": config["pard_token"],
        "norm_before_residual": bool(config.get("norm_before_residual", False)),
    }


def _table(config: Mapping[str, Any], layer: str) -> Table:
    """What every draft of the family has. layer: prefix of its first decoder layer."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    aux_size, num_aux = config.get("target_hidden_size") or hidden, config.get("num_aux_hidden_states") or 3
    table = {
        "fc.weight": Expected((hidden, num_aux * aux_size)),
        **layer_table(config, layer, 2 * hidden),
        f"{layer}.hidden_norm.weight": Expected((hidden,)),
        "norm.weight": Expected((hidden,)),
    }
    draft_vocab = config.get("draft_vocab_size")
    if draft_vocab is not None:
        table["lm_head.weight"] = Expected((draft_vocab, hidden))
        table["d2t"] = Expected((draft_vocab,), dtype=torch.int64)
        table["t2d"] = Expected((vocab,), dtype=torch.bool)
    if config.get("fc_norm"):
        table |= {f"fc_norm.{index}.weight": Expected((aux_size,)) for index in range(num_aux)}
    return table


def _embedding(config: Mapping[str, Any], *, required: bool) -> Table:
    return {"embed_tokens.weight": Expected((config["vocab_size"], config["hidden_size"]), required=required)}


def _peagle_table(config: Mapping[str, Any]) -> Table:
    table = _table(config, "layers.0") | _embedding(config, required=True)
    for index in range(1, config["num_hidden_layers"]):
        table |= layer_table(config, f"layers.{index}", config["hidden_size"])
    table["mask_hidden"] = Expected((1, 1, table["fc.weight"].shape[1]))
    return table


def _is_family(config: Mapping[str, Any]) -> bool:
    return config.get("architectures") == [_ARCHITECTURE]


_EAGLE3_SGLANG = Layout(
    kind="eagle3",
    engine="sglang",
    describe=lambda config, dtype: {
        **_describe_eagle3(config, dtype),
        "eagle_config": {"use_aux_hidden_state": True, _LAYER_IDS: list(config.layer_ids)},
    },
    parse=lambda config: _parse_eagle3(config, list(config["eagle_config"][_LAYER_IDS])),
    matches=lambda config: _is_family(config) and _LAYER_IDS in (config.get("eagle_config") or {}),
    # SGLang always installs the target's embedding.
    table=lambda config: _table(config, "midlayer"),
)

_EAGLE3_VLLM = Layout(
    kind="eagle3",
    engine="vllm",
    describe=lambda config, dtype: {
        **_describe_eagle3(config, dtype),
        _LAYER_IDS: before_layer_ids(config.layer_ids),
        "norm_before_residual": False,
    },
    parse=lambda config: _parse_eagle3(config, output_layer_ids(list(config[_LAYER_IDS]))),
    matches=lambda config: (
        _is_family(config)
        and _LAYER_IDS in config
        and "eagle_config" not in config
        and not config.get("parallel_drafting")
    ),
    table=lambda config: _table(config, "layers.0") | _embedding(config, required=False),
    renames=(("midlayer.", "layers.0."),),
)

_PEAGLE_VLLM = Layout(
    kind="peagle",
    engine="vllm",
    describe=_describe_peagle,
    parse=_parse_peagle,
    matches=lambda config: _is_family(config) and _LAYER_IDS in config and bool(config.get("parallel_drafting")),
    table=_peagle_table,
)

EAGLE_LAYOUTS: tuple[Layout, ...] = (_EAGLE3_SGLANG, _EAGLE3_VLLM, _PEAGLE_VLLM)
