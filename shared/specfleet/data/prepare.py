"""Conversation files → prompt set: streaming, content-addressed, published in one rename.

The directory's name is a hash of everything that decides its content: the files' contents, tokenizer, chat template,
options and this code's revision. Preparing the same thing again only opens it; a new template is a new directory.
"""

import hashlib
import itertools
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from specfleet.config.models import DataSection
from specfleet.contracts.errors import DataError
from specfleet.data.cache import exclusive, published, sha256_file
from specfleet.data.conversation import Conversation, RowRejected
from specfleet.data.prompt_set import FORMAT, PromptSet, PromptSetWriter
from specfleet.data.render import ChatRenderer, Rendered, RenderOptions
from specfleet.data.sources import Reading, iter_conversations, resolve_sources
from specfleet.data.stats import Tally
from specfleet.target.facts import read_text_facts, tokenizer_hash
from specfleet.target.hub import target_dir

# Rises when rendering, masking or selection changes, so that old sets are not reused.
REVISION = 1
# Rows tokenised in one call: enough for the tokenizer's threads, and a bound on memory together with the second number.
_BATCH_ROWS = 256
_BATCH_CHARACTERS = 4_000_000


@dataclass(frozen=True)
class PrepareOptions:
    """Limits and selection; see DataSection for the meaning of each field. keep: field → accepted values."""

    max_length: int = 2048
    max_response_tokens: int = 0
    max_samples: int = 0
    keep: dict[str, list[str]] = field(default_factory=dict)
    min_loss_tokens: int = 2
    keep_empty_answers: bool = False

    @classmethod
    def from_section(cls, data: DataSection) -> "PrepareOptions":
        return cls(data.max_length, data.max_response_tokens, data.max_samples, dict(data.filter))

    @property
    def render(self) -> RenderOptions:
        return RenderOptions(self.max_length, self.max_response_tokens, self.min_loss_tokens, self.keep_empty_answers)


def prepare_prompt_set(
    sources: Sequence[str | Path],
    target: str | Path,
    out_root: str | Path,
    options: PrepareOptions | None = None,
    trust_remote_code: bool = False,
) -> PromptSet:
    """Renders `sources` for the target (a name, `target_dir`) and returns the set under `out_root`; one that is there is reused.

    Raises DataError (SF-DATA-*), ConfigError (SF-TARGET-*): the caller can show them as they are.
    """
    options = options or PrepareOptions()
    paths = resolve_sources(sources)
    directory = target_dir(target, "none")
    facts = read_text_facts(directory)
    renderer = ChatRenderer.load(directory, facts.vocab_size, facts.eos_token_ids, trust_remote_code)
    identity = {
        "format": FORMAT, "revision": REVISION, "options": asdict(options), "vocab_size": facts.vocab_size,
        "stop_ids": sorted(renderer.stop_ids), "tokenizer_hash": tokenizer_hash(directory),
        "template_hash": hashlib.sha256(renderer.template.encode()).hexdigest(),
        "inputs": [{"file": p.name, "bytes": p.stat().st_size, "sha256": sha256_file(p)} for p in paths],
    }  # fmt: skip
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    final = Path(out_root).expanduser().resolve() / f"prompts-{key[:16]}"
    with exclusive(final.parent / f".{final.name}.lock"):
        if (existing := _reusable(final)) is not None:
            return existing
        with published(final) as folder:
            _write(folder, paths, renderer, options, identity)
    return PromptSet.open(final)


def _reusable(final: Path) -> PromptSet | None:
    if not final.exists():
        return None
    try:
        return PromptSet.open(final)
    except DataError:
        # Altered or cut short since it was written: kept aside for whoever wants to look, and prepared again.
        final.rename(Path(tempfile.mkdtemp(prefix=f".{final.name}.damaged-", dir=final.parent)) / final.name)
        return None


def _write(
    directory: Path, paths: list[Path], renderer: ChatRenderer, options: PrepareOptions, identity: dict[str, Any]
) -> None:
    reading, tally, writer = Reading(), Tally(), PromptSetWriter(directory)
    interleave = options.max_samples > 0 and len(paths) > 1
    conversations = iter_conversations(paths, reading, options.keep, interleave)
    try:
        for row, rendered in _rendered(conversations, renderer, options):
            if isinstance(rendered, RowRejected):
                reading.rejects.add(row.where, rendered)
                continue
            writer.add(_columns(row, rendered))
            tally.add(row, rendered)
        _check(reading, tally, options)
        counts = {"rows_read": reading.rows_read, **tally.counts()}
        rejects = dict(sorted(reading.rejects.counts.items()))
        examples = dict(sorted(reading.rejects.examples.items()))
        writer.finish({**identity, "counts": counts, "rejects": rejects, "reject_examples": examples, **tally.tables()})
    finally:
        writer.abandon()


def _rendered(
    conversations: Iterator[Conversation], renderer: ChatRenderer, options: PrepareOptions
) -> Iterator[tuple[Conversation, Rendered | RowRejected]]:
    """Rows with their outcome, until max_samples are kept. No more rows are read than are accounted for."""
    kept = 0
    while not options.max_samples or kept < options.max_samples:
        # With a limit, never read beyond what could still be kept: rows read = rows kept + rows rejected.
        room = min(_BATCH_ROWS, options.max_samples - kept) if options.max_samples else _BATCH_ROWS
        batch = _take(conversations, room)
        if not batch:
            return
        for row, rendered in zip(batch, renderer.render_batch(batch, options.render), strict=True):
            kept += not isinstance(rendered, RowRejected)
            yield row, rendered


def _take(conversations: Iterator[Conversation], rows: int) -> list[Conversation]:
    batch, characters = [], 0
    for row in itertools.islice(conversations, rows):
        batch.append(row)
        characters += sum(len(message["content"]) for message in row.messages)
        if characters > _BATCH_CHARACTERS:
            break
    return batch


def _columns(row: Conversation, rendered: Rendered) -> dict[str, Any]:
    return {
        "id": row.id, "source": row.source, "split": row.split, "finish": row.finish, "license": row.license,
        "input_ids": rendered.input_ids, "loss_mask": rendered.loss_mask.tobytes(),
        "num_tokens": len(rendered.input_ids), "num_loss_tokens": int(rendered.loss_mask.sum()),
        "prompt_tokens": rendered.prompt_tokens, "flags": list(rendered.flags),
    }  # fmt: skip


def _check(reading: Reading, tally: Tally, options: PrepareOptions) -> None:
    accounted = tally.rows + reading.rejects.total()
    if reading.rows_read != accounted:
        raise DataError(
            "SF-DATA-CONSERVATION",
            f"{reading.rows_read} rows were read but {accounted} are accounted for ({tally.rows} kept, "
            f"{reading.rejects.total()} rejected): a fault of this program, please report it",
        )
    if tally.rows == 0:
        unknown = sorted(set(options.keep) - reading.fields_seen - {"source"})
        hint = (
            f". No row has the filter's field {', '.join(unknown)}. Leave it out (a run: -s data.filter={{}})"
            if unknown
            else ""
        )
        raise DataError(
            "SF-DATA-NO-ROWS",
            f"none of {reading.rows_read} rows can be trained on: {reading.rejects.describe()}{hint}",
        )
