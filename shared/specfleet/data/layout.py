"""Where in a rendered conversation the assistant speaks: exact character spans, with any chat template.

The conversation is rendered twice: as it is, and with two private-use characters around each answer. When the second
text, without those characters, equals the first, they mark the answers exactly; no model family's pattern is searched
for. A template that trims or splits content is met by moving the marks inwards, past white space or a thinking block.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from specfleet.data.conversation import Conversation, Message, RowRejected

# Unassigned code points of two private planes: text that already holds one is rejected rather than guessed at.
_START, _END = "\U000f1e7a", "\U000f1e7b"
_MARKS = re.compile(f"[{_START}{_END}]")
_THINK_END = "</think>"

Render = Callable[[list[Message]], str]
# Content → what stays outside the marks before it, the marked part, what stays outside after it.
Split = Callable[[str], tuple[str, str, str]]


@dataclass(frozen=True, slots=True)
class Span:
    """Characters [start, end) of one answer. What follows may be its end-of-turn token.

    open_ended: the answer goes on (tool calls the template wrote out) up to the next end-of-turn token.
    """

    start: int
    end: int
    open_ended: bool = False


@dataclass(frozen=True, slots=True)
class Layout:
    """The rendered text, its supervised spans in order, and what had to be left out of supervision (flags)."""

    text: str
    spans: tuple[Span, ...]
    flags: tuple[str, ...]


def lay_out(conversation: Conversation, render: Render, generation_prompt: str) -> Layout:
    """Renders and finds the answers. generation_prompt: what the template puts before an answer ("" when unknown).

    Raises RowRejected: template_rewrites_content, reasoning_dropped, reserved_text.
    """
    messages = conversation.messages
    if any(_MARKS.search(m["content"]) for m in messages):
        raise RowRejected("reserved_text", f"content holds {_START!r} or {_END!r}")
    text = render(messages)
    for split in (_whole, _inside_white_space, _after_thinking):
        if (found := _locate(messages, text, split, render)) is not None:
            return _supervise(messages, text, found, generation_prompt)
    raise RowRejected("template_rewrites_content", "the chat template changes an answer, so it cannot be located")


def _whole(content: str) -> tuple[str, str, str]:
    return "", content, ""


def _inside_white_space(content: str) -> tuple[str, str, str]:
    core = content.strip()
    before, _, after = content.partition(core) if core else (content, "", "")
    return before, core, after


def _after_thinking(content: str) -> tuple[str, str, str]:
    head, tag, answer = content.rpartition(_THINK_END)
    before, core, after = _inside_white_space(answer)
    return head + tag + before, core, after


def _marked(message: Message, split: Split) -> Message:
    """Marks the answer; a message that only calls tools is marked at the first call's name, as its content is empty."""
    content = message["content"]
    if _calls_only(message):
        first, *rest = message["tool_calls"]
        function = {**first["function"], "name": _START + first["function"]["name"] + _END}
        return {**message, "tool_calls": [{**first, "function": function}, *rest]}
    before, core, after = split(content)
    return {**message, "content": before + _START + core + _END + after}


def _locate(messages: list[Message], text: str, split: Split, render: Render) -> list[Span] | None:
    """Every answer's characters in `text`; None when marks placed by `split` do not survive the template unchanged."""
    answers = [m for m in messages if m["role"] == "assistant"]
    marked = render([_marked(m, split) if m["role"] == "assistant" else m for m in messages])
    positions = [match.start() - i for i, match in enumerate(_MARKS.finditer(marked))]
    if _MARKS.sub("", marked) != text or len(positions) != 2 * len(answers):
        return None
    spans = [Span(start, end) for start, end in zip(positions[::2], positions[1::2], strict=True)]
    for message, span in zip(answers, spans, strict=True):
        # The template may have changed what is between the marks, which the comparison above cannot tell.
        if not _calls_only(message) and text[span.start : span.end] != split(message["content"])[1]:
            return None
    return spans


def _supervise(messages: list[Message], text: str, found: list[Span], generation_prompt: str) -> Layout:
    answers = [m for m in messages if m["role"] == "assistant"]
    spans: list[Span] = []
    flags: list[str] = []
    floor = 0
    for message, answer in zip(answers, found, strict=True):
        span = _generated(message, text, answer, floor, generation_prompt)
        if span is None:
            # The turn was generated after its own reasoning, which this rendering no longer shows: context only.
            flags.append("history_reasoning_dropped")
        else:
            spans.append(span)
        floor = answer.end
    if not spans:
        raise RowRejected(
            "reasoning_dropped", "the template deletes the reasoning that every answer was generated after"
        )
    return Layout(text, tuple(spans), tuple(dict.fromkeys(flags)))


def _generated(message: Message, text: str, answer: Span, floor: int, generation_prompt: str) -> Span | None:
    """From where generation began to the answer's end; None when the message's reasoning is not in the text.

    Between the generation prompt and the answer there may be white space or the message's reasoning (both generated), a
    tool call's opening (generated), or a block the template inserts, such as an empty think block (part of the prompt).
    """
    opening = text.rfind(generation_prompt, floor, answer.start) if generation_prompt else -1
    begin = opening + len(generation_prompt) if opening >= 0 else answer.start
    reasoning = _reasoning(message)
    if reasoning and reasoning not in text[begin if opening >= 0 else floor : answer.end]:
        return None
    calls = bool(message.get("tool_calls"))
    gap = text[begin : answer.start]
    if gap and (gap.isspace() or _calls_only(message) or (reasoning and reasoning in gap)):
        return Span(begin, answer.end, open_ended=calls)
    return Span(answer.start, answer.end, open_ended=calls)


def _calls_only(message: Message) -> bool:
    return bool(message.get("tool_calls")) and not message["content"].strip()


def _reasoning(message: Message) -> str:
    """The message's reasoning, in a field of its own or before </think> in its content; "" when there is none."""
    own = message.get("reasoning_content")
    if isinstance(own, str) and own.strip():
        return own.strip()
    head, tag, _ = message["content"].rpartition(_THINK_END)
    return head.replace("<think>", "").strip() if tag else ""
