"""What a command prints: rich text for people, or one JSON document on stdout for machines. Messages go to stderr."""

import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from google.protobuf.message import Message
    from rich.console import Console

PIPE_WIDTH = 160


def console(stderr: bool = False) -> "Console":
    """Without a terminal there is no width to respect: tables are not squeezed into 80 columns."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, highlight=False, width=None if stream.isatty() else PIPE_WIDTH)


def say(line: str) -> None:
    """A message for the person at the terminal; never part of the machine output."""
    print(line, file=sys.stderr, flush=True)


def print_json(document: Any) -> None:
    print(json.dumps(document, ensure_ascii=False, default=str), flush=True)


def emit(as_json: bool, document: Any, render: "Callable[[Console], None]") -> None:
    """document on stdout when asked for JSON, else whatever render prints."""
    if as_json:
        print_json(document)
    else:
        render(console())


def to_dict(message: "Message") -> dict[str, Any]:
    """A wire record as plain JSON types: proto field names, numbers as numbers, defaults included."""
    return {field.name: _plain(field, getattr(message, field.name), message) for field in message.DESCRIPTOR.fields}


def _plain(field: Any, value: Any, message: "Message") -> Any:
    nested = field.message_type
    if nested is not None and nested.GetOptions().map_entry:
        return dict(value)
    if nested is None:
        return list(value) if not isinstance(value, str | bytes | int | float) else value
    if hasattr(value, "DESCRIPTOR"):
        return to_dict(value) if message.HasField(field.name) else None
    return [to_dict(item) for item in value]


def human_bytes(count: float) -> str:
    """1536 → '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable: GiB returns")


def human_rate(tokens_per_s: float) -> str:
    """1234.5 → '1,234 tok/s'."""
    return f"{tokens_per_s:,.0f} tok/s"
