"""Drafts as Hugging Face directories in the layouts of serving engines, checked against the engines' loader tables."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from specfleet.contracts.errors import ExportError
from specfleet.drafts.base import Draft
from specfleet.drafts.export.card import render_card, write_acceptance
from specfleet.drafts.export.layout import Layout
from specfleet.drafts.export.layouts import LAYOUTS, detect_layout, find_layout
from specfleet.drafts.export.tables import check_against_table
from specfleet.drafts.registry import build_draft

__all__ = ["LAYOUTS", "Exported", "export_draft", "export_engine", "load_export", "weights_hash", "write_acceptance"]

_WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class Exported:
    """files: names inside directory. weights_hash: see `weights_hash`."""

    directory: Path
    layout: str
    files: tuple[str, ...]
    weights_hash: str


def export_draft(
    draft: Draft,
    layout: str,
    out_dir: str | Path,
    *,
    facts: Mapping[str, str] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    embedding_VH: torch.Tensor | None = None,
) -> Exported:
    """Writes config.json, model.safetensors and README.md; replaces an earlier export there, and nothing else.

    layout: "sglang" or "vllm". facts: provenance for the model card. embedding_VH: the target's embedding, for engines
    whose loader may read it from the draft; most take the target's own, and some drafts train their own.
    Raises ExportError SF-EXPORT-LAYOUT, SF-EXPORT-TENSORS, SF-EXPORT-NONFINITE or SF-EXPORT-EXISTS.
    """
    form = find_layout(draft.kind, layout)
    config = form.describe(draft.config, dtype)
    tensors = {form.exported_name(name): _stored(tensor, dtype) for name, tensor in draft.state_dict().items()}
    if embedding_VH is not None and "embed_tokens.weight" not in tensors:
        tensors["embed_tokens.weight"] = _stored(embedding_VH, dtype)
    where = f"{draft.kind} export for {layout}"
    check_against_table(tensors, form.table(config), where)
    _check_finite(tensors, where)
    digest = weights_hash(tensors)
    target = Path(out_dir).absolute()
    if target.exists() and any(target.iterdir()) and not (target / _WEIGHTS).is_file():
        raise ExportError(
            "SF-EXPORT-EXISTS", f"{target} holds something that is not an export; choose another directory"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    # Written aside and renamed, so that a reader never meets half an export.
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        save_file(tensors, partial / _WEIGHTS, metadata={"format": "pt"})
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        (partial / "README.md").write_text(render_card(draft.kind, layout, digest, facts or {}), encoding="utf-8")
        os.chmod(partial, 0o755)  # mkdtemp makes it private
        if target.exists():
            shutil.rmtree(target)
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return Exported(target, layout, tuple(sorted(path.name for path in target.iterdir())), digest)


def load_export(directory: str | Path) -> Draft:
    """The draft of an export in any known layout, fp32 on the CPU; strict against the engine's loader table.

    Raises ExportError SF-EXPORT-MISSING, SF-EXPORT-UNKNOWN or SF-EXPORT-TENSORS, ConfigError SF-DRAFT-CONFIG.
    """
    folder = Path(directory)
    layout, config = _read_layout(folder)
    try:
        tensors = load_file(folder / _WEIGHTS)
    except Exception as error:  # safetensors raises its own untyped error for foreign files
        raise ExportError("SF-EXPORT-MISSING", f"{folder} is not a readable export: {error}") from error
    tensors = {layout.current_name(name): tensor for name, tensor in tensors.items()}
    try:
        table, sizes = layout.table(config), layout.parse(config)
    except KeyError as error:
        raise ExportError("SF-EXPORT-UNKNOWN", f"{folder / 'config.json'} does not say what {error} is") from error
    check_against_table(tensors, table, str(folder))
    draft = build_draft(layout.kind, sizes)
    if "embed_tokens.weight" not in draft.state_dict():
        tensors.pop("embed_tokens.weight", None)  # the decoder brings the target's
    draft.load_state_dict({layout.module_name(name): tensor for name, tensor in tensors.items()}, strict=True)
    return draft.eval()


def export_engine(directory: str | Path) -> str:
    """The engine in whose layout an export is written. Raises ExportError SF-EXPORT-MISSING, SF-EXPORT-UNKNOWN."""
    return _read_layout(Path(directory))[0].engine


def _read_layout(folder: Path) -> tuple[Layout, dict[str, Any]]:
    """Layout and config.json."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ExportError("SF-EXPORT-MISSING", f"{folder} is not a readable export: {error}") from error
    return detect_layout(config, str(folder)), config


def weights_hash(tensors: Mapping[str, torch.Tensor]) -> str:
    """sha256 (hex) over names, dtypes, shapes and bytes, in name order."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _stored(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    tensor = tensor.detach().cpu()
    return (tensor.to(dtype) if tensor.is_floating_point() else tensor).contiguous()


def _check_finite(tensors: Mapping[str, torch.Tensor], where: str) -> None:
    bad = [name for name, tensor in tensors.items() if tensor.is_floating_point() and not tensor.isfinite().all()]
    if bad:
        raise ExportError(
            "SF-EXPORT-NONFINITE", f"{where}: NaN or infinite weights in {', '.join(bad)}; use another checkpoint"
        )
