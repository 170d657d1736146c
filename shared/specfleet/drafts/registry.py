"""The one table of draft architectures."""

from collections.abc import Mapping
from typing import Any

import torch

from specfleet.contracts.errors import ConfigError
from specfleet.drafts.base import Draft
from specfleet.drafts.dflash import DFlashDraft
from specfleet.drafts.domino import DominoDraft
from specfleet.drafts.dspark import DSparkDraft
from specfleet.drafts.eagle3 import Eagle3Draft
from specfleet.drafts.peagle import PEagleDraft

DRAFTS: dict[str, type[Draft]] = {
    Eagle3Draft.kind: Eagle3Draft,
    DFlashDraft.kind: DFlashDraft,
    DominoDraft.kind: DominoDraft,
    DSparkDraft.kind: DSparkDraft,
    PEagleDraft.kind: PEagleDraft,
}


def build_draft(kind: str, config: Mapping[str, Any]) -> Draft:
    """An untrained draft on the CPU in float32. Raises ConfigError SF-DRAFT-KIND or SF-DRAFT-CONFIG."""
    if kind not in DRAFTS:
        raise ConfigError(
            "SF-DRAFT-KIND", f"there is no draft architecture {kind!r}; known: {', '.join(sorted(DRAFTS))}"
        )
    return DRAFTS[kind].from_config(config)


def untrained_like(draft: Draft, seed: int) -> Draft:
    """The same architecture and vocabulary map with fresh weights: the "before" of a comparison. On the CPU in float32."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        fresh = build_draft(draft.kind, draft.config.to_dict())
    for name, buffer in fresh.named_buffers():
        buffer.copy_(draft.get_buffer(name))
    return fresh.eval()
