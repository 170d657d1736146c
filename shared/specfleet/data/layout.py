"""Where in a rendered conversation the assistant speaks: exact character spans, with any chat template.

The conversation is rendered twice: as it is, and with two private-use characters around each answer. When the second text,
without those characters, equals the first, they mark the answers exactly; no model family's pattern is searched for.
A template that trims or splits content is met by moving the marks inwards, past white space or a thinking block.
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
        marked = render([_marked(m, split) if m["role"] == "assistant" else m for m in messages])
        if _MARKS.sub("", marked) == text:
            return _spans(messages, text, marked, generation_prompt)
    raise RowRejected("template_rewrites_content", "the chat template changes an answer; its tokens cannot be located")


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


def _marked(message: Message, split: Callable[[str], tuple[str, str, str]]) -> Message:
    """Marks the answer; a message that only calls tools is marked at the first call's name, as its content is empty."""
    content = message["content"]
    if not content.strip() and message.get("tool_calls"):
        first, *rest = message["tool_calls"]
        function = {**first["function"], "name": _START + first["function"]["name"] + _END}
        return {**message, "tool_calls": [{**first, "function": function}, *rest]}
    before, core, after = split(content)
    return {**message, "content": before + _START + core + _END + after}


def _spans(messages: list[Message], text: str, marked: str, generation_prompt: str) -> Layout:
    positions = [match.start() - i for i, match in enumerate(_MARKS.finditer(marked))]
    answers = [m for m in messages if m["role"] == "assistant"]
    if len(positions) != 2 * len(answers):
        raise RowRejected("template_rewrites_content", f"{len(positions) // 2} of {len(answers)} answers are rendered")
    spans: list[Span] = []
    flags: list[str] = []
    floor = 0
    for message, start, end in zip(answers, positions[::2], positions[1::2], strict=True):
        span = _generated(message, text, Span(start, end), floor, generation_prompt)
        if span is None:
            # The turn was generated after its own reasoning, which this rendering no longer shows: context only.
            flags.append("history_reasoning_dropped")
        else:
            spans.append(span)
        floor = end
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
    calls_only = calls and not message["content"].strip()
    if gap and (gap.isspace() or calls_only or (reasoning and reasoning in gap)):
        return Span(begin, answer.end, open_ended=calls)
    return Span(answer.start, answer.end, open_ended=calls)


def _reasoning(message: Message) -> str:
    """The message's reasoning, in a field of its own or before </think> in its content; "" when there is none."""
    own = message.get("reasoning_content")
    if isinstance(own, str) and own.strip():
        return own.strip()
    head, tag, _ = message["content"].rpartition(_THINK_END)
    return head.replace("<think>", "").strip() if tag else ""
