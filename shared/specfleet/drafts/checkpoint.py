"""Reads the draft out of a training checkpoint (docs/design.md §6), without the trainer."""

import hashlib
import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from specfleet.contracts.errors import ContractError, DataError
from specfleet.drafts.base import Draft
from specfleet.drafts.registry import build_draft

_FORMAT = 1
_WEIGHTS = "draft.safetensors"


def load_draft_checkpoint(directory: str | Path) -> tuple[Draft, dict[str, Any]]:
    """The draft in fp32 on the CPU, and checkpoint.json.

    Raises DataError SF-CHECKPOINT-MISSING when the folder is not a complete checkpoint, ContractError
    SF-CHECKPOINT-FORMAT, SF-CHECKPOINT-CORRUPT or SF-CHECKPOINT-TENSORS.
    """
    folder = Path(str(directory).removeprefix("file://"))
    try:
        meta: dict[str, Any] = json.loads((folder / "checkpoint.json").read_text(encoding="utf-8"))
        digest = hashlib.sha256((folder / _WEIGHTS).read_bytes()).hexdigest()
    except (OSError, ValueError) as error:
        raise DataError("SF-CHECKPOINT-MISSING", f"{folder} is not a complete checkpoint: {error}") from error
    if meta.get("format") != _FORMAT:
        raise ContractError(
            "SF-CHECKPOINT-FORMAT", f"{folder} has checkpoint format {meta.get('format')}, this version reads {_FORMAT}"
        )
    if digest != meta["files"].get(_WEIGHTS):
        raise ContractError(
            "SF-CHECKPOINT-CORRUPT",
            f"{folder / _WEIGHTS} has sha256 {digest}, checkpoint.json says {meta['files'].get(_WEIGHTS)}; use another checkpoint",
        )
    draft = build_draft(meta["draft"]["kind"], meta["draft"]["config"])
    try:
        draft.load_state_dict(load_file(folder / _WEIGHTS), strict=True)
    except RuntimeError as error:
        raise ContractError("SF-CHECKPOINT-TENSORS", f"{folder} does not fit its own draft config: {error}") from error
    return draft.eval(), meta
