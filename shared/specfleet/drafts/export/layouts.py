"""The one table of export layouts: per draft architecture and serving engine, how config.json and tensor names look."""

from collections.abc import Mapping
from typing import Any

from specfleet.contracts.errors import ExportError
from specfleet.drafts.export.dflash import DFLASH_LAYOUTS
from specfleet.drafts.export.domino import DOMINO_LAYOUTS
from specfleet.drafts.export.dspark import DSPARK_LAYOUTS
from specfleet.drafts.export.eagle import EAGLE_LAYOUTS
from specfleet.drafts.export.layout import Layout

LAYOUTS: tuple[Layout, ...] = (*EAGLE_LAYOUTS, *DFLASH_LAYOUTS, *DOMINO_LAYOUTS, *DSPARK_LAYOUTS)

# Engines people will ask for and that have no code for the architecture, in any release read for this project.
_UNSERVED = {
    ("peagle", "sglang"): "SGLang does not serve P-EAGLE",
    ("domino", "vllm"): "vLLM does not serve Domino",
}


def find_layout(kind: str, engine: str) -> Layout:
    """Raises ExportError SF-EXPORT-LAYOUT."""
    for layout in LAYOUTS:
        if (layout.kind, layout.engine) == (kind, engine):
            return layout
    known = ", ".join(layout.engine for layout in LAYOUTS if layout.kind == kind) or "none"
    reason = _UNSERVED.get((kind, engine))
    raise ExportError(
        "SF-EXPORT-LAYOUT",
        f"a {kind} draft cannot be exported for {engine!r}{f': {reason}' if reason else ''}; layouts of {kind}: {known}",
    )


def detect_layout(config: Mapping[str, Any], where: str) -> Layout:
    """Raises ExportError SF-EXPORT-UNKNOWN."""
    found = [layout for layout in LAYOUTS if layout.matches(config)]
    if len(found) != 1:
        raise ExportError(
            "SF-EXPORT-UNKNOWN",
            f"{where} is not an export this project knows: architectures {config.get('architectures')}, and "
            f"{len(found)} layouts match. An EAGLE-3 export must name its layer ids, either in "
            "eagle_config.eagle_aux_hidden_state_layer_ids (SGLang) or in a top-level eagle_aux_hidden_state_layer_ids (vLLM)",
        )
    return found[0]
