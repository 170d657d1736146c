"""One conversation, in one shape: what a row of any supported file becomes, or the reason why it cannot."""

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]

_ROLES = {
    "system": "system", "developer": "system",
    "user": "user", "human": "user",
    "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant",
    "tool": "tool",
}  # fmt: skip
# Tool replies under other names: only meaningful in a row that declares tools.
_TOOL_ROLES = {"observation": "tool", "function": "tool", "ipython": "tool"}


class RowRejected(Exception):
    """This row cannot be used: `reason` is counted, `detail` is shown for the first row of each reason."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


@dataclass
class Rejects:
    """Rows left out, counted by reason, with the first one of each reason as an example."""

    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def add(self, where: str, rejected: RowRejected) -> None:
        self.counts[rejected.reason] += 1
        self.examples.setdefault(rejected.reason, f"{where}: {rejected.detail}" if rejected.detail else where)

    def total(self) -> int:
        return self.counts.total()

    def describe(self) -> str:
        """One line: every reason with its count and example, the commonest first."""
        parts = [f"{reason} {count} (first: {self.examples[reason]})" for reason, count in self.counts.most_common()]
        return ", ".join(parts) or "no row at all"


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages in the form chat templates expect; the last one is the assistant's.

    With `response_token_ids` the target's own ids are trained on and nothing is tokenised again. `prompt_token_ids` may
    then be None, and the prompt is rendered from the messages; with both, messages is empty. `response_loss_mask` says
    which of those ids the target generated, where several answers follow one another; None: all.
    """

    where: str
    id: str
    source: str
    split: str
    finish: str
    license: str
    messages: list[Message]
    tools: list[Any] | None
    prompt_token_ids: list[int] | None
    response_token_ids: list[int] | None
    response_loss_mask: list[int] | None = None


def parse_row(
    row: Any, where: str, default_source: str, keep: dict[str, list[str]], to_answer: bool = False
) -> Conversation:
    """A raw row → Conversation. to_answer: all its messages, for a target to answer; otherwise those up to the last answer.

    Raises RowRejected: filtered, not_an_object, empty, unknown_format, unknown_role, no_assistant, bad_content,
    unsupported_content, tool_arguments_not_json, bad_tools, bad_token_ids.
    """
    if not isinstance(row, dict):
        raise RowRejected("not_an_object", f"a {type(row).__name__}")
    source = str(row.get("source") or default_source)
    split, finish, licence = (str(row.get(name) or "") for name in ("split", "finish", "license"))
    for name, values in keep.items():
        value = source if name == "source" else row.get(name)
        if (str(value) if value is not None else "") not in values:
            raise RowRejected("filtered", f"{name} is {value!r}")
    prompt_ids, response_ids = _token_ids(row, "prompt_token_ids"), _token_ids(row, "response_token_ids")
    tools = _tools(row.get("tools"))
    # With prompt and answer as the target saw and wrote them, messages could only contradict them.
    has_ids = prompt_ids is not None and response_ids is not None
    messages = [] if has_ids and not to_answer else _messages(row, tools is not None)
    while messages and not to_answer and messages[-1]["role"] != "assistant":
        # What follows the last answer teaches nothing, and a template may render earlier turns differently for it.
        messages.pop()
    if not messages and not has_ids:
        raise RowRejected("no_assistant", "none of its messages is the assistant's")
    return Conversation(
        where, str(row.get("id") or where), source, split, finish, licence, messages, tools, prompt_ids, response_ids,
        _loss_mask(row, response_ids),
    )  # fmt: skip


def _messages(row: dict[str, Any], has_tools: bool) -> list[Message]:
    raw = row.get("messages") if row.get("messages") is not None else row.get("conversations")
    if raw is None:
        raise RowRejected("unknown_format", f"neither 'messages' nor 'conversations' in {sorted(row)[:8]}")
    if not isinstance(raw, list):
        raise RowRejected("unknown_format", f"messages must be a list, not {type(raw).__name__}")
    if not raw:
        raise RowRejected("empty")
    return [_message(item, has_tools) for item in raw]


def _message(item: Any, has_tools: bool) -> Message:
    if not isinstance(item, dict):
        raise RowRejected("unknown_format", f"a message is a {type(item).__name__}, not an object")
    name = item.get("role", item.get("from"))
    role = _ROLES.get(str(name)) or (_TOOL_ROLES.get(str(name)) if has_tools else None)
    if role is None:
        raise RowRejected("unknown_role", f"role {name!r}")
    message: Message = {"role": role, "content": _content(item.get("content", item.get("value")), item)}
    if item.get("tool_calls"):
        message["tool_calls"] = _tool_calls(item["tool_calls"])
    for key in ("reasoning_content", "name", "tool_call_id"):
        if item.get(key):
            message[key] = item[key]
    return message


def _content(value: Any, item: dict[str, Any]) -> str:
    """Text as one string: text parts are joined, since many templates take only strings."""
    if isinstance(value, str):
        return value
    if value is None and item.get("tool_calls"):
        return ""
    if isinstance(value, list) and all(isinstance(part, dict) for part in value):
        kinds = {str(part.get("type")) for part in value}
        if kinds <= {"text"} and all(isinstance(part.get("text"), str) for part in value):
            return "".join(part["text"] for part in value)
        raise RowRejected("unsupported_content", f"parts of type {sorted(kinds)}; only text is supported")
    raise RowRejected("bad_content", f"content is {type(value).__name__}")


def _tool_calls(value: Any) -> list[dict[str, Any]]:
    """Both forms in use: a list, or the list as a JSON string; arguments likewise. Templates get objects."""
    calls = _json(value, "bad_tools") if isinstance(value, str) else value
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise RowRejected("bad_tools", "tool_calls must be a list of objects")
    parsed = []
    for call in calls:
        function = dict(call.get("function") or call)
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            arguments = _json(arguments, "tool_arguments_not_json")
        if not isinstance(function.get("name"), str):
            raise RowRejected("bad_tools", "a tool call has no function name")
        function["arguments"] = arguments if arguments is not None else {}
        parsed.append(
            {**call, "type": "function", "function": function} if "function" in call else {"function": function}
        )
    return parsed


def _tools(value: Any) -> list[Any] | None:
    tools = _json(value, "bad_tools") if isinstance(value, str) and value else value
    if tools in (None, "", []):
        return None
    if not isinstance(tools, list):
        raise RowRejected("bad_tools", f"tools must be a list, not {type(tools).__name__}")
    return tools


def _json(text: str, reason: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise RowRejected(reason, f"{error} in {text[:60]!r}") from error


def _token_ids(row: dict[str, Any], name: str) -> list[int] | None:
    value = row.get(name)
    if value is None:
        return None
    # bool is an int to Python, but a list of them is a mask in the wrong column.
    if not isinstance(value, list) or not all(type(v) is int for v in value):
        raise RowRejected("bad_token_ids", f"{name} must be a list of integers")
    return value


def _loss_mask(row: dict[str, Any], response_ids: list[int] | None) -> list[int] | None:
    mask = _token_ids(row, "response_loss_mask")
    if mask is None or response_ids is None:
        return None
    if len(mask) != len(response_ids) or not set(mask) <= {0, 1} or not mask or not mask[0] or not mask[-1]:
        raise RowRejected(
            "bad_token_ids",
            f"response_loss_mask must hold one 0 or 1 for each of the {len(response_ids)} response_token_ids, and begin and "
            "end with an answer",
        )
    return mask
