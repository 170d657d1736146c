"""Domino for SGLang, which serves it inside its DFlash model. Also reads what trainers wrote before it was served."""

from collections.abc import Mapping
from typing import Any

import torch

from specfleet.contracts.errors import ExportError
from specfleet.drafts.domino import PURE_PREFIX, DominoConfig
from specfleet.drafts.export.block import backbone_table, describe_backbone, parse_backbone
from specfleet.drafts.export.layout import Layout
from specfleet.drafts.export.tables import Expected, Table

_ARCHITECTURE = "DFlashDraftModel"
_TRAINERS_OWN = "DominoDraftModel"
_PROJECTOR = "domino"


def _nested(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return config.get("dflash_config") or {}


def _matches(config: Mapping[str, Any]) -> bool:
    known = config.get("architectures") in ([_ARCHITECTURE], [_TRAINERS_OWN])
    return known and _nested(config).get("projector_type") == _PROJECTOR


def _describe(config: DominoConfig, dtype: torch.dtype) -> dict[str, Any]:
    document = describe_backbone(config, dtype, _ARCHITECTURE)
    document["dflash_config"] |= {
        "projector_type": _PROJECTOR,
        "shift_label": config.sample_from_anchor,
        "pure_draft_prefix_len": PURE_PREFIX,
        "gru_hidden_dim": config.gru_hidden_size,
        "emb_dim": config.embedding_size,
    }
    return document


def _parse(config: Mapping[str, Any]) -> dict[str, Any]:
    """shift_label is never inferred: drafts of either kind load into the other and are accepted by chance only."""
    nested = _nested(config)
    problems = [
        f"dflash_config.{name} is missing"
        for name in ("shift_label", "gru_hidden_dim", "emb_dim")
        if name not in nested
    ]
    if nested.get("pure_draft_prefix_len") != PURE_PREFIX:
        problems.append(
            f"dflash_config.pure_draft_prefix_len is {nested.get('pure_draft_prefix_len')}, only {PURE_PREFIX} is served"
        )
    if config.get("emb_dim", nested.get("emb_dim")) != nested.get("emb_dim"):
        problems.append(f"emb_dim {config['emb_dim']} contradicts dflash_config.emb_dim {nested.get('emb_dim')}")
    if problems:
        raise ExportError("SF-EXPORT-UNKNOWN", f"not a Domino draft this project can read: {'; '.join(problems)}")
    return {
        **parse_backbone(config),
        "sample_from_anchor": nested["shift_label"],
        "gru_hidden_size": nested["gru_hidden_dim"],
        "embedding_size": nested["emb_dim"],
    }


def _table(config: Mapping[str, Any]) -> Table:
    draft = _parse(config)
    hidden, gru, inner = draft["hidden_size"], draft["gru_hidden_size"], draft["embedding_size"]
    return backbone_table(config) | {
        "prefix_gru.weight_ih_l0": Expected((3 * gru, hidden)),
        "prefix_gru.weight_hh_l0": Expected((3 * gru, gru)),
        "embed_proj.0.weight": Expected((inner, hidden + gru)),
        "embed_proj.2.weight": Expected((draft["vocab_size"], inner)),
    }


DOMINO_LAYOUTS: tuple[Layout, ...] = (
    Layout(
        kind="domino",
        engine="sglang",
        describe=_describe,
        parse=_parse,
        matches=_matches,
        table=_table,
        legacy_prefixes=("logit_head.",),
    ),
)
