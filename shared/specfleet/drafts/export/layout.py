"""One serving engine's form of one draft architecture."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from specfleet.drafts.export.tables import Table


@dataclass(frozen=True)
class Layout:
    """One engine's form of one draft architecture."""

    kind: str
    engine: str
    describe: Callable[[Any, torch.dtype], dict[str, Any]]
    """Draft config and export dtype → config.json."""
    parse: Callable[[Mapping[str, Any]], dict[str, Any]]
    """config.json → draft config (as for `build_draft`)."""
    matches: Callable[[Mapping[str, Any]], bool]
    """Is this config.json written in this layout?"""
    table: Callable[[Mapping[str, Any]], Table]
    """config.json → the engine's loader table."""
    renames: tuple[tuple[str, str], ...] = ()
    """(module name prefix, exported prefix)."""
    legacy_prefixes: tuple[str, ...] = ()
    """Prefixes that older files put before some names; dropped on reading."""

    def exported_name(self, name: str) -> str:
        for inside, outside in self.renames:
            if name.startswith(inside):
                return outside + name.removeprefix(inside)
        return name

    def current_name(self, name: str) -> str:
        """A stored name as the loader table has it."""
        for prefix in self.legacy_prefixes:
            name = name.removeprefix(prefix)
        return name

    def module_name(self, name: str) -> str:
        for inside, outside in self.renames:
            if name.startswith(outside):
                return inside + name.removeprefix(outside)
        return name


def rope_keys(theta: float, scaling: Mapping[str, Any] | None) -> dict[str, Any]:
    """Both schemas: engines built on transformers 4 read the first two keys, those on 5 the third."""
    plain = dict(scaling) if scaling else None
    return {
        "rope_theta": theta,
        "rope_scaling": plain,
        "rope_parameters": {"rope_type": "default", **(plain or {}), "rope_theta": theta},
    }


def parse_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """rope_theta and rope_scaling (None: unscaled) of a draft config, from either schema."""
    rope = dict(config.get("rope_parameters") or {})
    scaling = rope or dict(config.get("rope_scaling") or {})
    theta = scaling.pop("rope_theta", config.get("rope_theta", 10000.0))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    return {"rope_theta": theta, "rope_scaling": None if kind == "default" else scaling}
