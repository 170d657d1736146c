"""DFlash for SGLang and vLLM. Both register `DFlashDraftModel` and read `dflash_config`."""

from collections.abc import Mapping
from typing import Any

import torch

from specfleet.contracts.errors import ExportError
from specfleet.drafts.block import BlockConfig
from specfleet.drafts.export.block import backbone_table, describe_backbone, parse_backbone
from specfleet.drafts.export.layout import Layout

_ARCHITECTURE = "DFlashDraftModel"
# vLLM's own switch; SGLang does not know it, so it tells the two layouts apart.
_VLLM_KEY = "use_aux_hidden_state"


def _is_dflash(config: Mapping[str, Any]) -> bool:
    """Domino drafts share the architecture and name their projector."""
    nested = config.get("dflash_config") or {}
    return config.get("architectures") == [_ARCHITECTURE] and nested.get("projector_type") in (None, "dflash")


def _describe(config: BlockConfig, dtype: torch.dtype) -> dict[str, Any]:
    if config.sample_from_anchor:
        raise ExportError(
            "SF-EXPORT-LAYOUT",
            "engines serve DFlash drafts whose slots predict their own position; this one predicts the next",
        )
    return describe_backbone(config, dtype, _ARCHITECTURE)


def _describe_vllm(config: BlockConfig, dtype: torch.dtype) -> dict[str, Any]:
    if "sliding_attention" in config.layer_types:
        raise ExportError(
            "SF-EXPORT-LAYOUT",
            "vLLM runs every layer of a DFlash draft with full attention; this draft was trained with "
            f"{config.layer_types.count('sliding_attention')} sliding layers. Export it for sglang, or train without "
            "strategy.sliding_window",
        )
    document = _describe(config, dtype)
    document["dflash_config"][_VLLM_KEY] = True
    return {**document, "target_hidden_size": config.hidden_size}


_SGLANG = Layout(
    kind="dflash",
    engine="sglang",
    describe=_describe,
    parse=parse_backbone,
    matches=lambda config: _is_dflash(config) and _VLLM_KEY not in (config.get("dflash_config") or {}),
    table=backbone_table,
)

_VLLM = Layout(
    kind="dflash",
    engine="vllm",
    describe=_describe_vllm,
    parse=parse_backbone,
    matches=lambda config: _is_dflash(config) and _VLLM_KEY in (config.get("dflash_config") or {}),
    table=lambda config: backbone_table(config, embedding=True),
)

DFLASH_LAYOUTS: tuple[Layout, ...] = (_SGLANG, _VLLM)
