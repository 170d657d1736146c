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
