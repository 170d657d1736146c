"""What a prompt set holds: counts while it is written, and the summary people read."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from specfleet.data.conversation import Conversation
from specfleet.data.prompt_set import PromptSet
from specfleet.data.render import Rendered


@dataclass
class Tally:
    """Running counts of kept rows."""

    rows: int = 0
    tokens: int = 0
    loss_tokens: int = 0
    sources: dict[str, Counter[str]] = field(default_factory=dict)
    splits: Counter[str] = field(default_factory=Counter)
    finish: Counter[str] = field(default_factory=Counter)
    licenses: Counter[str] = field(default_factory=Counter)
    flags: Counter[str] = field(default_factory=Counter)

    def add(self, row: Conversation, rendered: Rendered) -> None:
        tokens, loss_tokens = len(rendered.input_ids), int(rendered.loss_mask.sum())
        self.rows += 1
        self.tokens += tokens
        self.loss_tokens += loss_tokens
        self.sources.setdefault(row.source, Counter()).update(rows=1, tokens=tokens, loss_tokens=loss_tokens)
        self.splits[row.split or "-"] += 1
        self.finish[row.finish or "-"] += 1
        self.licenses[row.license or "-"] += 1
        self.flags.update(rendered.flags)

    def counts(self) -> dict[str, int]:
        return {"rows": self.rows, "tokens": self.tokens, "loss_tokens": self.loss_tokens}

    def tables(self) -> dict[str, dict[str, Any]]:
        """The manifest's histograms, in a fixed order."""
        return {
            "sources": {name: dict(self.sources[name]) for name in sorted(self.sources)},
            **{name: dict(sorted(getattr(self, name).items())) for name in ("splits", "finish", "licenses", "flags")},
        }


@dataclass(frozen=True)
class Summary:
    """What `specctl data prepare` and `specctl data stats` show. rows_read = rows + sum(rejects)."""

    path: str
    digest: str
    rows_read: int
    rows: int
    tokens: int
    loss_tokens: int
    tokens_per_row: dict[str, int]
    """min, p50, p90, p99, max."""
    sources: dict[str, dict[str, int]]
    """source → rows, tokens, loss_tokens."""
    splits: dict[str, int]
    finish: dict[str, int]
    licenses: dict[str, int]
    flags: dict[str, int]
    rejects: dict[str, int]
    reject_examples: dict[str, str]


def summarize(prompt_set: PromptSet) -> Summary:
    """Reads the manifest and one column of the shards."""
    manifest, lengths = prompt_set.manifest, prompt_set.num_tokens
    quantiles = np.percentile(lengths, [0, 50, 90, 99, 100], method="nearest").astype(int).tolist()
    counts = manifest["counts"]
    return Summary(
        path=str(prompt_set.path),
        digest=prompt_set.digest,
        rows_read=counts["rows_read"],
        rows=counts["rows"],
        tokens=counts["tokens"],
        loss_tokens=counts["loss_tokens"],
        tokens_per_row=dict(zip(("min", "p50", "p90", "p99", "max"), quantiles, strict=True)),
        **{
            name: manifest[name]
            for name in ("sources", "splits", "finish", "licenses", "flags", "rejects", "reject_examples")
        },
    )
