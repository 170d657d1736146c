"""What may be published, subscribed to and followed: the stream table and its guards."""

import pytest

from specfleet.bus.base import MAX_MESSAGE_BYTES, MAX_PROMPT_BYTES
from specfleet.bus.connection import parse_servers
from specfleet.bus.factory import open_bus
from specfleet.bus.streams import (
    check_follow,
    check_message,
    check_subscription,
    filters_overlap,
    stream_of,
    subject_matches,
)
from specfleet.contracts import ids
from specfleet.contracts.errors import ConfigError

HASH = "0f" * 32


@pytest.mark.parametrize(
    ("subject", "stream"),
    [
        (ids.prompts_subject(HASH, "my-run"), "PROMPTS"),
        (ids.samples_subject("my-run"), "SAMPLES"),
        (ids.steps_subject("my_run", 3, 0), "STEPS"),
        (ids.releases_subject("pool-0"), "RELEASES"),
        (ids.events_subject("my-run", "step"), "EVENTS"),
        ("prompts.abc.*", "PROMPTS"),
        ("events.>", "EVENTS"),
        ("events.run.a.b.c", "EVENTS"),
    ],
)
def test_every_subject_of_the_project_has_its_stream(subject: str, stream: str) -> None:
    assert stream_of(subject).name == stream


@pytest.mark.parametrize(
    "subject",
    [
        "",
        "prompts",
        "prompts.a",
        "prompts.a.b.c",
        "prompts.>",
        "samples.a b",
        "samples.",
        "events",
        "tensors.a",
        "samples.ä",
    ],
)
def test_other_subjects_are_refused(subject: str) -> None:
    with pytest.raises(ValueError, match="subject of no stream"):
        stream_of(subject)


def test_only_bytes_travel() -> None:
    numpy = pytest.importorskip("numpy")
    for data in (numpy.zeros(4), bytearray(b"x"), memoryview(b"x"), "text", None):
        with pytest.raises(TypeError, match="only bytes travel"):
            check_message("samples.r", data, "")  # type: ignore[arg-type]


def test_size_limits_are_per_stream() -> None:
    check_message("samples.r", bytes(MAX_MESSAGE_BYTES), "")
    check_message("prompts.c.r", bytes(MAX_PROMPT_BYTES), "")
    with pytest.raises(ValueError, match=f"{MAX_MESSAGE_BYTES + 1} bytes"):
        check_message("samples.r", bytes(MAX_MESSAGE_BYTES + 1), "")
    with pytest.raises(ValueError, match=f"exceeds the {MAX_PROMPT_BYTES} bytes"):
        check_message("prompts.c.r", bytes(MAX_PROMPT_BYTES + 1), "")


def test_wildcards_and_unusable_message_ids_are_refused() -> None:
    with pytest.raises(ValueError, match="wildcard"):
        check_message("samples.*", b"", "")
    for message_id in ("a b", "a\r\nNats-Rollup: all", "ü", "x" * 257):
        with pytest.raises(ValueError, match="message id"):
            check_message("samples.r", b"", message_id)
    check_message("samples.r", b"", "run/e0001-p000000042/a1")


def test_queues_are_subscribed_to_and_histories_followed() -> None:
    assert check_subscription("samples.*", "coordinator", 1, 1.0).name == "SAMPLES"
    assert check_follow("steps.r.1.0").name == "STEPS"
    with pytest.raises(ValueError, match="followed, not subscribed"):
        check_subscription("steps.r.1.0", "d", 1, 1.0)
    with pytest.raises(ValueError, match="do not follow"):
        check_follow("samples.r")
    for durable in ("", "a.b", "a b", "a>", "x" * 129):
        with pytest.raises(ValueError, match="durable"):
            check_subscription("samples.*", durable, 1, 1.0)
    for max_ack_pending, ack_wait_s in ((0, 1.0), (1, 0.0)):
        with pytest.raises(ValueError, match="must be positive"):
            check_subscription("samples.*", "d", max_ack_pending, ack_wait_s)


@pytest.mark.parametrize(
    ("pattern", "subject", "matches"),
    [
        ("prompts.*.r", "prompts.c.r", True),
        ("prompts.*.r", "prompts.c.s", False),
        ("events.>", "events.r.step", True),
        ("events.r.>", "events.r", False),
        ("events.*", "events.r.step", False),
        ("samples.r", "samples.r", True),
    ],
)
def test_subject_matching(pattern: str, subject: str, matches: bool) -> None:
    assert subject_matches(pattern, subject) is matches


def test_filters_overlap_when_some_subject_matches_both() -> None:
    assert filters_overlap("prompts.a.*", "prompts.*.b")
    assert filters_overlap("prompts.a.b", "prompts.a.b")
    assert not filters_overlap("prompts.a.*", "prompts.b.*")


def test_bus_urls() -> None:
    assert parse_servers("nats://a:1,b:2?replicas=3") == (["nats://a:1", "nats://b:2"], 3)
    assert parse_servers("nats://127.0.0.1:4222") == (["nats://127.0.0.1:4222"], 1)
    for url in ("", "http://a:1", "nats://", "nats://a:1?replicas=2", "nats://a:1?x=1", "memory://", "memory://a/b"):
        with pytest.raises(ConfigError) as caught:
            open_bus(url)
        assert caught.value.code == "SF-CONFIG-BUS-URL"


def test_a_bad_url_does_not_show_its_password() -> None:
    with pytest.raises(ConfigError) as caught:
        open_bus("nats://user:hunter2@host:1?replicas=9")
    assert "hunter2" not in str(caught.value)
