"""DSpark for SGLang and vLLM. Both register `Qwen3DSparkModel` and read the Markov head's keys at the top level."""

from collections.abc import Mapping
from typing import Any

import torch

from specfleet.contracts.errors import ExportError
from specfleet.drafts.dspark import DSparkConfig
from specfleet.drafts.export.block import backbone_table, describe_backbone, parse_backbone
from specfleet.drafts.export.layout import Layout
from specfleet.drafts.export.tables import Expected, Table

_ARCHITECTURE = "Qwen3DSparkModel"
_TRAINERS_OWN = "DSparkDraftModel"
# Where vLLM looks for the captured layers and the mask token; SGLang finds both in dflash_config.
_VLLM_KEY = "target_layer_ids"
_DEFAULTS = {
    "markov_rank": None,
    "markov_head_type": "vanilla",
    "enable_confidence_head": False,
    "confidence_head_with_markov": True,
    "sample_from_anchor": True,
}


def _is_dspark(config: Mapping[str, Any]) -> bool:
    return config.get("architectures") in ([_ARCHITECTURE], [_TRAINERS_OWN])


def _describe(config: DSparkConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Engines read the Markov keys at the top level, trainers in dflash_config: they are written twice."""
    heads = {
        "markov_rank": config.markov_rank,
        "markov_head_type": config.markov_head,
        "enable_confidence_head": config.confidence_head,
        "confidence_head_with_markov": config.confidence_with_markov,
        "sample_from_anchor": config.sample_from_anchor,
    }
    document = describe_backbone(config, dtype, _ARCHITECTURE) | heads
    grouped = config.num_key_value_heads < config.num_attention_heads
    document["dflash_config"] |= {"projector_type": "dspark", "attention_mode": "gqa" if grouped else "mha", **heads}
    return document


def _describe_vllm(config: DSparkConfig, dtype: torch.dtype) -> dict[str, Any]:
    problems = []
    if config.markov_head != "vanilla":
        problems.append(f"its Markov head knows only the previous token, this draft has a {config.markov_head} head")
    if "sliding_attention" in config.layer_types:
        problems.append("it runs every layer with full attention, this draft has sliding layers")
    if problems:
        raise ExportError("SF-EXPORT-LAYOUT", f"vLLM cannot serve this DSpark draft: {'; '.join(problems)}")
    return {
        **_describe(config, dtype),
        _VLLM_KEY: list(config.layer_ids),
        "mask_token_id": config.mask_token_id,
        "target_hidden_size": config.hidden_size,
    }


def _parse(config: Mapping[str, Any]) -> dict[str, Any]:
    nested = config.get("dflash_config") or {}
    heads, problems = {}, []
    for name, default in _DEFAULTS.items():
        stated = [where[name] for where in (config, nested) if where.get(name) is not None]
        if len(set(stated)) > 1:
            problems.append(f"{name} is {stated[0]} at the top level and {stated[1]} in dflash_config")
        heads[name] = stated[0] if stated else default
    if not heads["markov_rank"]:
        problems.append("markov_rank is missing")
    if not heads["sample_from_anchor"]:
        problems.append("sample_from_anchor is false: such blocks are DFlash's, not DSpark's")
    if problems:
        raise ExportError("SF-EXPORT-UNKNOWN", f"not a DSpark draft this project can read: {'; '.join(problems)}")
    return {
        **parse_backbone(config),
        "sample_from_anchor": True,
        "markov_rank": heads["markov_rank"],
        "markov_head": heads["markov_head_type"],
        "confidence_head": heads["enable_confidence_head"],
        "confidence_with_markov": heads["confidence_head_with_markov"],
    }


def _table(config: Mapping[str, Any]) -> Table:
    draft = _parse(config)
    hidden, vocab, rank = draft["hidden_size"], draft["vocab_size"], draft["markov_rank"]
    table = backbone_table(config, embedding=True) | {
        "markov_head.markov_w1.weight": Expected((vocab, rank)),
        "markov_head.markov_w2.weight": Expected((vocab, rank)),
    }
    if draft["markov_head"] == "gated":
        table["markov_head.gate_proj.weight"] = Expected((rank, hidden + rank))
        table["markov_head.gate_proj.bias"] = Expected((rank,))
    if draft["markov_head"] == "rnn":
        table["markov_head.joint_proj.weight"] = Expected((3 * rank, 2 * rank + hidden))
        table["markov_head.joint_proj.bias"] = Expected((3 * rank,))
    if draft["confidence_head"]:
        width = hidden + (rank if draft["confidence_with_markov"] else 0)
        table["confidence_head.proj.weight"] = Expected((1, width))
        table["confidence_head.proj.bias"] = Expected((1,))
    return table


def _layout(engine: str) -> Layout:
    vllm = engine == "vllm"
    return Layout(
        kind="dspark",
        engine=engine,
        describe=_describe_vllm if vllm else _describe,
        parse=_parse,
        matches=lambda config: _is_dspark(config) and (_VLLM_KEY in config) == vllm,
        table=_table,
        legacy_prefixes=("logit_head.",),
    )


DSPARK_LAYOUTS: tuple[Layout, ...] = (_layout("sglang"), _layout("vllm"))
