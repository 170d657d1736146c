"""The one table of draft architectures."""

from collections.abc import Mapping
from typing import Any

from specfleet.contracts.errors import ConfigError
from specfleet.drafts.base import Draft
from specfleet.drafts.eagle3 import Eagle3Draft

DRAFTS: dict[str, type[Draft]] = {
    Eagle3Draft.kind: Eagle3Draft,
}


def build_draft(kind: str, config: Mapping[str, Any]) -> Draft:
    """An untrained draft on the CPU in float32. Raises ConfigError SF-DRAFT-KIND or SF-DRAFT-CONFIG."""
    if kind not in DRAFTS:
        raise ConfigError("SF-DRAFT-KIND", f"there is no draft architecture {kind!r}; known: {', '.join(sorted(DRAFTS))}")
    return DRAFTS[kind].from_config(config)
