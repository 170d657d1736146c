"""Is this export what it claims to be? Facts compared one by one; a check that cannot be made says why."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from specfleet.contracts.errors import SpecfleetError
from specfleet.data.prompt_set import PromptSet
from specfleet.drafts.base import Draft
from specfleet.drafts.checkpoint import load_draft_checkpoint
from specfleet.drafts.export import weights_hash
from specfleet.gate.exporting import PROVENANCE
from specfleet.target.facts import TargetFacts

PASS, FAIL, SKIP = "PASS", "FAIL", "SKIP"


@dataclass(frozen=True)
class Check:
    name: str
    result: str
    detail: str

    def to_dict(self) -> dict[str, str]:
        return asdict(self)


@dataclass(frozen=True)
class Origin:
    """What an export says about itself, and the checkpoint it names. `trained` is None when that is gone."""

    provenance: dict[str, Any] | None
    trained: Draft | None
    meta: dict[str, Any]
    why_not: str

    @classmethod
    def of(cls, export_dir: Path) -> "Origin":
        try:
            provenance = json.loads((export_dir / PROVENANCE).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            return cls(
                None, None, {}, f"{export_dir} has no readable {PROVENANCE} ({error}): make it with specctl export"
            )
        try:
            trained, meta = load_draft_checkpoint(provenance["checkpoint_uri"])
        except SpecfleetError as error:
            return cls(provenance, None, {}, f"the checkpoint cannot be read any more: {error.message}")
        return cls(provenance, trained, meta, "")


def check_weights(export_dir: Path, draft: Draft, origin: Origin, run_id: str) -> list[Check]:
    """Exported tensors and configuration against the checkpoint that the export names."""
    if origin.provenance is None:
        # An export of a run must be provable; one from elsewhere cannot be.
        return [Check("weights", FAIL if run_id else SKIP, origin.why_not)]
    found, expected = weights_hash(load_file(export_dir / "model.safetensors")), origin.provenance["weights_hash"]
    if found != expected:
        detail = f"tensors have sha256 {found}, {expected} were exported: the file was changed since"
        return [Check("weights", FAIL, detail)]
    if origin.trained is None or origin.provenance["untrained"]:
        return [Check("weights", PASS, f"as exported (sha256 {found}). {origin.why_not or 'Untrained export'}")]
    return [
        _same_tensors(draft, origin.trained, getattr(torch, origin.provenance["dtype"]), origin.meta),
        # Not the recorded dictionary: one written before a field existed means its default.
        _same_config(draft.config.to_dict(), origin.trained.config.to_dict()),
    ]


def _same_tensors(draft: Draft, trained: Draft, dtype: torch.dtype, meta: dict[str, Any]) -> Check:
    exported, expected = draft.state_dict(), trained.state_dict()
    differing = sorted(exported.keys() ^ expected.keys())
    for name in exported.keys() & expected.keys():
        tensor = expected[name]
        rounded = tensor.to(dtype).to(tensor.dtype) if tensor.is_floating_point() else tensor
        if not torch.equal(exported[name], rounded):
            differing.append(name)
    if differing:
        return Check(
            "weights", FAIL, f"differ from the checkpoint of step {meta['step']}: {', '.join(sorted(differing))}"
        )
    return Check("weights", PASS, f"{len(exported)} tensors equal those of step {meta['step']} in {dtype}")


def _same_config(exported: dict[str, Any], trained: dict[str, Any]) -> Check:
    keys = sorted(exported.keys() | trained.keys())
    differing = [
        f"{k}: trained {trained.get(k)}, exported {exported.get(k)}" for k in keys if exported.get(k) != trained.get(k)
    ]
    if differing:
        return Check("config", FAIL, "; ".join(differing))
    return Check("config", PASS, f"{len(keys)} fields as trained")


def check_target(origin: Origin, facts: TargetFacts) -> Check:
    """The target it is measured with is the one it was trained for."""
    if origin.trained is None:
        return Check("target", SKIP, origin.why_not)
    expected = origin.meta["contract"].get("weights_hash", "")
    if expected != facts.weights_hash:
        return Check(
            "target", FAIL, f"trained for weights {expected}, measured with {facts.weights_hash} ({facts.path})"
        )
    return Check("target", PASS, f"weights {facts.weights_hash}")


def check_tokenizer(prompts: PromptSet, facts: TargetFacts) -> Check:
    """The evaluation rows were made with the target's own tokenizer."""
    expected = prompts.manifest.get("tokenizer_hash", "")
    if expected != facts.tokenizer_hash:
        return Check(
            "tokenizer", FAIL, f"rows were made with tokenizer {expected}, the target has {facts.tokenizer_hash}"
        )
    return Check("tokenizer", PASS, facts.tokenizer_hash)
