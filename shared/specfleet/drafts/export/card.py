"""The model card of an export: what it was trained from, how to serve it, and what acceptance it was measured to have."""

from collections.abc import Mapping
from pathlib import Path

from specfleet.contracts.errors import ExportError

_BEGIN, _END = "<!-- acceptance -->", "<!-- /acceptance -->"
_NOT_MEASURED = "Not measured yet: run the gate on this export."


def render_card(kind: str, engine: str, weights_hash: str, facts: Mapping[str, str]) -> str:
    """README.md. facts: name → value, as in {"target": …, "contract": …, "prompt set": …, "run": …, "step": …}."""
    rows = {"architecture": kind, "layout": engine, "weights sha256": weights_hash, **facts}
    table = "\n".join(f"| {name} | `{value}` |" for name, value in rows.items())
    return f"""---
tags: [speculative-decoding, draft-model, {kind}]
---

# {kind} draft model

A draft for speculative decoding. It proposes tokens that its target model verifies, so it changes how fast the target
answers and never what it answers. It is useless with any other target.

| fact | value |
|---|---|
{table}

## Acceptance

{_BEGIN}
{_NOT_MEASURED}
{_END}
"""


def write_acceptance(directory: Path, markdown: str) -> None:
    """Replaces the acceptance section of an export's README.md. Raises ExportError SF-EXPORT-CARD when there is none."""
    file = directory / "README.md"
    try:
        head, rest = file.read_text(encoding="utf-8").split(_BEGIN, 1)
        _, tail = rest.split(_END, 1)
    except (OSError, ValueError) as error:
        raise ExportError("SF-EXPORT-CARD", f"{file} has no acceptance section to fill: {error}") from error
    file.write_text(f"{head}{_BEGIN}\n{markdown.strip()}\n{_END}{tail}", encoding="utf-8")
