"""Checkpoint → Hugging Face directory, with a record of where its weights come from."""

import json
from pathlib import Path
from typing import Any

import torch

from specfleet.config.serving import default_layout
from specfleet.drafts.checkpoint import load_draft_checkpoint
from specfleet.drafts.export import export_draft
from specfleet.drafts.registry import untrained_like
from specfleet.wire.gate_pb2 import ExportDraftRequest

PROVENANCE = "provenance.json"
# Every "before" of a comparison starts from the same weights.
UNTRAINED_SEED = 42
DTYPE = torch.bfloat16


def export_checkpoint(request: ExportDraftRequest) -> dict[str, Any]:
    """Fields of ExportDraftResponse. Raises what load_draft_checkpoint and export_draft raise."""
    draft, meta = load_draft_checkpoint(request.checkpoint_uri)
    if request.untrained:
        draft = untrained_like(draft, UNTRAINED_SEED)
    facts = {
        "run": str(request.run_id or meta["run_id"]),
        "step": "0 (untrained)" if request.untrained else str(meta["step"]),
        "target": Path(str(meta["target"])).name,
        "target weights sha256": str(meta["contract"].get("weights_hash", "")),
        "contract": str(meta["contract_hash"]),
        "prompt set": str(meta["prompt_set"]),
    }
    layout = request.layout or default_layout(draft.kind)
    exported = export_draft(draft, layout, request.output_dir, facts=facts, dtype=DTYPE)
    provenance = {
        "checkpoint_uri": request.checkpoint_uri,
        "run_id": facts["run"],
        "step": meta["step"],
        "untrained": request.untrained,
        "layout": exported.layout,
        "dtype": str(DTYPE).removeprefix("torch."),
        "weights_hash": exported.weights_hash,
    }
    (exported.directory / PROVENANCE).write_text(json.dumps(provenance, indent=1) + "\n", encoding="utf-8")
    return {
        "output_dir": str(exported.directory),
        "files": sorted({*exported.files, PROVENANCE}),
        "weights_hash": exported.weights_hash,
    }
