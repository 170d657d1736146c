"""The streams of docs/design.md §4, and what may be published to them. Pure; both backends stand on this table."""

import re
from dataclasses import dataclass

from specfleet.bus.base import MAX_MESSAGE_BYTES, MAX_PROMPT_BYTES

# An id seen again within this time is not stored again. An optimisation: the ledger's unique keys are the authority.
DUPLICATE_WINDOW_S = 120.0
# Message ids travel in a header line and are kept in the server's memory for the duplicate window.
MAX_MESSAGE_ID_CHARACTERS = 256
_DAY_S = 24 * 3600.0


@dataclass(frozen=True)
class StreamSpec:
    """One stream. A work queue keeps a message until it is acked; a limits stream until it is old or outnumbered."""

    name: str
    subjects: str
    work_queue: bool
    max_message_bytes: int = MAX_MESSAGE_BYTES
    # 0: no limit. A full work queue refuses (and publishers wait); a full limits stream drops its oldest.
    max_messages: int = 0
    max_messages_per_subject: int = 0
    max_age_s: float = 0.0


# Credits keep the queues orders of magnitude below this; it only stops a runaway publisher before the disk is full.
_QUEUE_MESSAGES = 1_000_000

STREAMS: dict[str, StreamSpec] = {
    spec.name: spec
    for spec in (
        StreamSpec("PROMPTS", "prompts.*.*", True, MAX_PROMPT_BYTES, max_messages=_QUEUE_MESSAGES),
        StreamSpec("SAMPLES", "samples.*", True, max_messages=_QUEUE_MESSAGES),
        # A rank needs the plans of `lookahead` windows; 1024 leaves room for re-issued ones.
        StreamSpec("STEPS", "steps.*.*.*", False, max_messages_per_subject=1024, max_age_s=7 * _DAY_S),
        StreamSpec("RELEASES", "releases.*", True, max_messages=_QUEUE_MESSAGES),
        StreamSpec("EVENTS", "events.>", False, max_messages=_QUEUE_MESSAGES, max_age_s=7 * _DAY_S),
    )
}

_TOKEN = re.compile(r"[A-Za-z0-9_=-]+")
_DURABLE = re.compile(r"[A-Za-z0-9_-]{1,128}")
# Visible ASCII: the id becomes a header line.
_MESSAGE_ID = re.compile(r"[!-~]*")


def stream_of(subject: str) -> StreamSpec:
    """The stream that owns a subject or filter. Raises ValueError when none does or a token is not usable."""
    tokens = subject.split(".")
    for spec in STREAMS.values():
        if _covers(spec.subjects.split("."), tokens) and all(_usable(token, spec) for token in tokens):
            return spec
    known = ", ".join(spec.subjects for spec in STREAMS.values())
    raise ValueError(
        f"{subject!r} is a subject of no stream; known: {known}, with tokens of letters, digits, '_', '-' and '='"
    )


def _covers(pattern: list[str], tokens: list[str]) -> bool:
    if tokens[0] != pattern[0] or len(tokens) < len(pattern):
        return False
    return pattern[-1] == ">" or len(tokens) == len(pattern) or (tokens[-1] == ">" and len(tokens) <= len(pattern))


def _usable(token: str, spec: StreamSpec) -> bool:
    return token == "*" or (token == ">" and spec.subjects.endswith(">")) or bool(_TOKEN.fullmatch(token))


def check_message(subject: str, data: bytes, message_id: str) -> StreamSpec:
    """Every publish passes here. Raises TypeError for anything but bytes; ValueError for size, subject, message id."""
    if not isinstance(data, bytes):
        # The bus's one rule on content: references are serialised bytes, tensors travel through the store.
        raise TypeError(
            f"only bytes travel on the bus, not {type(data).__name__}; tensors go through the feature store"
        )
    spec = stream_of(subject)
    if "*" in subject or ">" in subject:
        raise ValueError(f"cannot publish to {subject!r}: a wildcard is for subscriptions")
    if len(data) > spec.max_message_bytes:
        raise ValueError(
            f"a message of {len(data)} bytes to {subject!r} exceeds the {spec.max_message_bytes} bytes that stream "
            f"{spec.name} takes; put the content into the feature store and send a reference"
        )
    if len(message_id) > MAX_MESSAGE_ID_CHARACTERS or not _MESSAGE_ID.fullmatch(message_id):
        raise ValueError(
            f"message id {message_id[:80]!r} is not usable: up to {MAX_MESSAGE_ID_CHARACTERS} visible ASCII characters"
        )
    return spec


def check_subscription(subject: str, durable: str, max_ack_pending: int, ack_wait_s: float) -> StreamSpec:
    """Raises ValueError when the filter, the durable's name or a number cannot work."""
    spec = stream_of(subject)
    if not spec.work_queue:
        raise ValueError(f"{subject!r} belongs to stream {spec.name}, which is followed, not subscribed to")
    if not _DURABLE.fullmatch(durable):
        raise ValueError(f"durable {durable!r} is not usable: 1 to 128 letters, digits, '-' and '_'")
    if max_ack_pending < 1 or ack_wait_s <= 0:
        raise ValueError(f"max_ack_pending ({max_ack_pending}) and ack_wait_s ({ack_wait_s}) must be positive")
    return spec


def check_follow(subject: str) -> StreamSpec:
    spec = stream_of(subject)
    if spec.work_queue:
        raise ValueError(f"{subject!r} belongs to stream {spec.name}, a work queue: subscribe to it, do not follow it")
    return spec


def subject_matches(pattern: str, subject: str) -> bool:
    """NATS matching: `*` is one token, a final `>` one or more."""
    wanted, tokens = pattern.split("."), subject.split(".")
    if wanted[-1] == ">":
        wanted, tokens = wanted[:-1], tokens[: len(wanted) - 1] if len(tokens) >= len(wanted) else []
    return len(wanted) == len(tokens) and all(w in ("*", t) for w, t in zip(wanted, tokens, strict=True))


def filters_overlap(first: str, second: str) -> bool:
    """Whether some subject matches both filters of one stream (equal numbers of tokens: work queues have no `>`)."""
    pairs = zip(first.split("."), second.split("."), strict=True)
    return all(a == b or "*" in (a, b) for a, b in pairs)
