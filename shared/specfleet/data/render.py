"""Conversation → token ids and loss mask, with the tokenizer's own chat template.

The loss mask says which tokens the target generated: an answer's content and its end-of-turn token; not the newline
after it, not headers, not blocks the template inserts. The whole conversation is tokenised once and the mask follows
from character offsets: the cost is linear in its length, and multi-byte characters cannot shift it.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from specfleet.contracts.errors import DataError
from specfleet.data.conversation import Conversation, Message, RowRejected
from specfleet.data.layout import Layout, Span, lay_out


@dataclass(frozen=True, slots=True)
class RenderOptions:
    """max_length: tokens per sample. max_response_tokens: supervised tokens per answer, 0 for no limit."""

    max_length: int = 2048
    max_response_tokens: int = 0
    min_loss_tokens: int = 2
    keep_empty_answers: bool = False


@dataclass(frozen=True, slots=True)
class Rendered:
    """One sample: input_ids [T] int32, loss_mask [T] uint8. It ends with its last supervised token.

    prompt_tokens: tokens before the first supervised one. flags: truncated_in_answer, turns_dropped,
    history_reasoning_dropped, no_end_of_turn, from_token_ids.
    """

    input_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]
    prompt_tokens: int
    flags: tuple[str, ...] = ()


@dataclass
class ChatRenderer:
    """Renders with one tokenizer. Build it with `load`."""

    tokenizer: Any
    vocab_size: int
    stop_ids: frozenset[int]
    template_kwargs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise DataError(
                "SF-DATA-SLOW-TOKENIZER",
                f"{type(self.tokenizer).__name__} has no fast backend, so answers cannot be located by character "
                "offsets. Convert it to a tokenizer.json first",
            )
        # A private copy without post-processor: no BOS is added to rendered text, and offsets are not trimmed.
        self._encoder = type(backend).from_str(backend.to_str())
        self._encoder.post_processor = None
        self._encoder.no_truncation()
        self._encoder.no_padding()
        self._special = {i for i, token in self._encoder.get_added_tokens_decoder().items() if token.special}
        self._prefixes_space = self._encode(["a"])[0].tokens[0] != self._encode(["\na"])[0].tokens[-1]
        self.generation_prompt = self._generation_prompt()
        opening = self._encode([self.generation_prompt])[0].ids[:1]
        self._not_closing = ({*opening, self.tokenizer.bos_token_id} - self.stop_ids) if opening else set()

    @classmethod
    def load(
        cls, target_dir: Path, vocab_size: int, stop_ids: Sequence[int], trust_remote_code: bool = False
    ) -> "ChatRenderer":
        """Loads the tokenizer of a target directory. Raises DataError SF-DATA-NO-TEMPLATE, SF-DATA-TOKENIZER."""
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(target_dir, trust_remote_code=trust_remote_code)
        except (OSError, ValueError, ImportError, KeyError) as error:
            raise DataError("SF-DATA-TOKENIZER", f"the tokenizer of {target_dir} cannot be loaded: {error}") from error
        if not tokenizer.chat_template:
            raise DataError(
                "SF-DATA-NO-TEMPLATE",
                f"the tokenizer of {target_dir} has no chat template, so conversations cannot be rendered as an engine "
                "would do it. Put the model's chat_template.jinja into that directory (instruct variants ship one)",
            )
        own = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        return cls(tokenizer, vocab_size, frozenset([*stop_ids, *own]))

    @property
    def template(self) -> str:
        """The chat template's text, for hashing."""
        return str(self.tokenizer.chat_template)

    def render_batch(self, rows: Sequence[Conversation], options: RenderOptions) -> list[Rendered | RowRejected]:
        """One result per row, in order; all texts are tokenised in one call."""
        results: list[Rendered | RowRejected | None] = [None] * len(rows)
        layouts: dict[int, Layout] = {}
        for i, row in enumerate(rows):
            try:
                if row.response_token_ids is not None:
                    results[i] = self._from_ids(row, options)
                else:
                    layouts[i] = self._lay_out(row, options)
            except RowRejected as rejected:
                results[i] = rejected
        encodings = self._encode([layout.text for layout in layouts.values()])
        for (i, layout), encoding in zip(layouts.items(), encodings, strict=True):
            try:
                results[i] = self._from_text(layout, encoding, options)
            except RowRejected as rejected:
                results[i] = rejected
        return [result for result in results if result is not None]

    def prompt_text(self, messages: list[Message], tools: list[Any] | None = None) -> str:
        """What an engine is prompted with: the messages and the generation prompt."""
        return self._render(messages, tools, add_generation_prompt=True)

    def prompt_ids(self, messages: list[Message], tools: list[Any] | None = None) -> list[int]:
        """Token ids of `prompt_text`. Raises RowRejected template_error."""
        ids: list[int] = self._encode([self.prompt_text(messages, tools)])[0].ids
        return ids

    def _encode(self, texts: list[str]) -> list[Any]:
        return list(self._encoder.encode_batch(texts, add_special_tokens=False))

    def _render(self, messages: list[Message], tools: list[Any] | None, add_generation_prompt: bool = False) -> str:
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    messages,
                    tools=tools,
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                    **self.template_kwargs,
                )
            )
        except Exception as error:  # a template is a program of its own: whatever it raises concerns this row alone
            raise RowRejected("template_error", f"{type(error).__name__}: {error}") from error

    def _generation_prompt(self) -> str:
        """What the template adds before an answer; "" when it cannot be told."""
        try:
            probe: list[Message] = [{"role": "user", "content": "x"}]
            closed, opened = self._render(probe, None), self._render(probe, None, add_generation_prompt=True)
        except RowRejected:
            return ""
        return opened[len(closed) :] if opened.startswith(closed) else ""

    def _lay_out(self, row: Conversation, options: RenderOptions) -> Layout:
        for message in row.messages:
            empty = message["role"] == "assistant" and not message["content"].strip() and not message.get("tool_calls")
            if empty and not options.keep_empty_answers:
                raise RowRejected("empty_answer")
        return lay_out(row, lambda messages: self._render(messages, row.tools), self.generation_prompt)

    def _from_text(self, layout: Layout, encoding: Any, options: RenderOptions) -> Rendered:
        ids = np.asarray(encoding.ids, dtype=np.int32)
        starts, ends = _bounds(encoding.offsets)
        if not self._prefixes_space and any(_straddled(starts, ends, span.start) for span in layout.spans):
            ids, starts, ends = self._encode_in_parts(layout)
        stops = np.isin(ids, list(self.stop_ids))
        mask = np.zeros(len(ids), dtype=np.uint8)
        flags = list(layout.flags)
        turns: list[tuple[int, int]] = []
        for span in layout.spans:
            first = int(np.searchsorted(starts, span.start, side="left"))
            if _straddled(starts, ends, span.start):
                first -= 1
            stop = self._end_of_turn(layout.text, ids, starts, span, flags)
            if stops[first : stop - 1].any():
                raise RowRejected("stop_token_in_answer", "an answer contains the end-of-turn token before its end")
            mask[first:stop] = 1
            turns.append((first, stop))
        self._check_bos(ids)
        return _cut(ids, mask, turns, flags, options)

    def _encode_in_parts(
        self, layout: Layout
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Tokenised with a cut where each generation began, as serving did; for answers whose first characters would
        otherwise merge with the prompt's last ones (a leading newline)."""
        cuts = [0, *(span.start for span in layout.spans), len(layout.text)]
        parts = self._encode([layout.text[a:b] for a, b in itertools.pairwise(cuts)])
        bounds = [_bounds(part.offsets) for part in parts]
        return (
            np.concatenate([np.asarray(part.ids, dtype=np.int32) for part in parts]),
            np.concatenate([starts + cut for (starts, _), cut in zip(bounds, cuts, strict=False)]),
            np.concatenate([ends + cut for (_, ends), cut in zip(bounds, cuts, strict=False)]),
        )

    def _end_of_turn(self, text: str, ids: Any, starts: Any, span: Span, flags: list[str]) -> int:
        """Index behind the answer's last token: its end-of-turn token where the template writes one."""
        stop = int(np.searchsorted(starts, span.end, side="left"))
        if span.open_ended:
            closing = next((i for i in range(stop, len(ids)) if self._closes(int(ids[i]))), None)
            if closing is not None:
                return closing + 1
        # A template may put white space between the answer and its end: generated as well.
        after = stop
        while after < len(ids) and not self._closes(int(ids[after])):
            end = int(starts[after + 1]) if after + 1 < len(ids) else len(text)
            if not text[int(starts[after]) : end].isspace():
                break
            after += 1
        if after < len(ids) and self._closes(int(ids[after])):
            return after + 1
        flags.append("no_end_of_turn")
        return stop

    def _closes(self, token: int) -> bool:
        """An end-of-turn token: a stop id, or a control token that is not the one that opens the next turn."""
        return token in self.stop_ids or (token in self._special and token not in self._not_closing)

    def _from_ids(self, row: Conversation, options: RenderOptions) -> Rendered:
        answer = row.response_token_ids or []
        if not answer:
            raise RowRejected("empty_answer", "response_token_ids is empty")
        prompt = row.prompt_token_ids
        if prompt is None:
            prompt = self.prompt_ids(row.messages[:-1], row.tools)
        bad = next((i for i in (*prompt, *answer) if not 0 <= i < self.vocab_size), None)
        if bad is not None:
            raise RowRejected("token_out_of_vocab", f"id {bad}, the target's vocabulary has {self.vocab_size}")
        ids = np.asarray([*prompt, *answer], dtype=np.int32)
        mask = np.zeros(len(ids), dtype=np.uint8)
        mask[len(prompt) :] = 1 if row.response_loss_mask is None else row.response_loss_mask
        turns = _runs(mask)
        if any(int(i) in self.stop_ids for first, stop in turns for i in ids[first : stop - 1]):
            raise RowRejected("stop_token_in_answer", "response_token_ids goes on after a stop id")
        self._check_bos(ids)
        return _cut(ids, mask, turns, ["from_token_ids"], options)

    def _check_bos(self, ids: npt.NDArray[np.int32]) -> None:
        bos = self.tokenizer.bos_token_id
        if bos is not None and len(ids) > 1 and ids[0] == bos and ids[1] == bos:
            raise RowRejected("duplicate_bos", f"the text starts with two BOS tokens (id {bos})")


def _cut(
    ids: npt.NDArray[np.int32],
    mask: npt.NDArray[np.uint8],
    turns: list[tuple[int, int]],
    flags: list[str],
    options: RenderOptions,
) -> Rendered:
    """Applies the limits. A cut answer ends the sample without end-of-turn token; what follows the last supervised
    token is dropped, so that it costs no prefill."""
    limit = options.max_length
    if options.max_response_tokens:
        for first, stop in turns:
            if stop - first > options.max_response_tokens:
                limit = min(limit, first + options.max_response_tokens)
                break
    if turns[0][0] >= limit:
        raise RowRejected(
            "truncated_before_answer", f"the prompt has {turns[0][0]} tokens, the limit is {options.max_length}"
        )
    if any(first < limit < stop for first, stop in turns):
        flags.append("truncated_in_answer")
    if any(first >= limit for first, _ in turns):
        flags.append("turns_dropped")
    end = max(min(stop, limit) for first, stop in turns if first < limit)
    ids, mask = ids[:end], mask[:end]
    if (count := int(mask.sum())) < options.min_loss_tokens:
        raise RowRejected(
            "too_few_loss_tokens", f"{count} supervised tokens, at least {options.min_loss_tokens} are needed"
        )
    return Rendered(ids, mask, turns[0][0], tuple(dict.fromkeys(flags)))


def _runs(mask: npt.NDArray[np.uint8]) -> list[tuple[int, int]]:
    """Half-open ranges of ones."""
    edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0)).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def _bounds(offsets: list[tuple[int, int]]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    pairs = np.asarray(offsets, dtype=np.int64).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]


def _straddled(starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64], position: int) -> bool:
    """Whether a token begins before the character and ends behind it."""
    before = int(np.searchsorted(starts, position, side="left")) - 1
    return before >= 0 and int(ends[before]) > position
