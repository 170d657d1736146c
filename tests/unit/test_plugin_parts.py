"""The parts of the SGLang plugin that need no SGLang: admission, requests, settings, the version table."""

import base64
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specfleet.capture.sglang_plugin.admission import Admission
from specfleet.capture.sglang_plugin.releases import TESTED, Function
from specfleet.capture.sglang_plugin.request import parse, refused
from specfleet.capture.sglang_plugin.settings import Settings
from specfleet.capture.sglang_plugin.versions import compare, functions_of, measure
from specfleet.contracts.capture import feature_table
from specfleet.contracts.errors import ConfigError, HostError, SpecfleetError
from specfleet.contracts.ids import parse_sample_id
from specfleet.sglang.patch import RELEASES
from specfleet.wire.records_pb2 import CaptureContract

TABLE = feature_table(CaptureContract(layers=[0, 2], final_state="post_norm", dtype="float32", hidden_size=4))
SAMPLE = "run/e0000-p000000003/a2"


# Admission


@given(st.lists(st.tuples(st.integers(1, 120), st.booleans()), max_size=40), st.integers(1, 100))
def test_everything_is_admitted_in_order_and_within_the_limit(steps: list[tuple[int, bool]], limit: int) -> None:
    admission: Admission[int] = Admission(limit)
    running: list[int] = []
    admitted: list[int] = []

    def admit() -> None:
        for item in admission.admit():
            running.append(item)
            admitted.append(item)
        # One that is larger than the limit runs alone.
        assert admission.bytes_under_way <= limit or len(running) == 1

    for number, (num_bytes, ends) in enumerate(steps):
        admission.offer(str(number), num_bytes, number)
        admit()
        if ends and running:
            admission.end(str(running.pop(0)))
            admit()
    while running:
        admission.end(str(running.pop()))
        admit()
    assert admitted == list(range(len(steps)))
    assert admission.bytes_under_way == admission.waiting == 0


def test_aborted_items_give_their_room_back() -> None:
    admission: Admission[str] = Admission(10)
    for name in ("a1", "a2", "b1", "a3", "b2"):
        admission.offer(name, 5, name.upper())
    assert admission.admit() == ["A1", "A2"]
    assert admission.abort(lambda name: name.startswith("a")) == ["A3"]
    assert admission.bytes_under_way == 0
    assert admission.admit() == ["B1", "B2"]
    admission.end("never seen")
    assert admission.bytes_under_way == 10


# Requests


def wish(**changes: Any) -> dict[str, Any]:
    return {"sample": SAMPLE, "store": "pool", "loss_mask": base64.b64encode(b"\0\1\1").decode(), **changes}


def test_a_request_knows_its_bytes_and_features_in_table_order() -> None:
    request = parse(wish(features=["final_state", "input_ids"]), [5, 6, 7], 10, "pool", TABLE)
    assert request.features == ("input_ids", "final_state")
    assert request.num_bytes == 3 * (4 + 4 * 4)
    assert request.attempt == parse_sample_id(SAMPLE)
    assert request.loss_mask == b"\0\1\1"
    assert parse(wish(), [5, 6, 7], 10, "pool", TABLE).features == tuple(TABLE)


@pytest.mark.parametrize(
    ("raw", "ids", "code", "kind"),
    [
        ("text", [1, 2, 3], "SF-SGLANG-REQUEST", "infra"),
        ({"sample": SAMPLE}, [1, 2, 3], "SF-SGLANG-REQUEST", "infra"),
        (wish(keys={}), [1, 2, 3], "SF-SGLANG-REQUEST", "infra"),
        (wish(sample="run/e0000-p000000003"), [1, 2, 3], "SF-SGLANG-REQUEST", "infra"),
        (wish(sample=7), [1, 2, 3], "SF-SGLANG-REQUEST", "infra"),
        (wish(loss_mask="?"), [1, 2, 3], "SF-SGLANG-REQUEST", "infra"),
        (wish(store="other"), [1, 2, 3], "SF-STORE-WRONG-POOL", "infra"),
        (wish(), [1, 2], "SF-CAPTURE-PROMPT", "sample"),
        (wish(features=["logits"]), [1, 2, 3], "SF-CAPTURE-PROMPT", "sample"),
        (wish(), [1, 10, 3], "SF-CAPTURE-TOKEN", "sample"),
        (wish(), [1, -1, 3], "SF-CAPTURE-TOKEN", "sample"),
    ],
)
def test_bad_requests_are_answered_not_captured(raw: Any, ids: list[int], code: str, kind: str) -> None:
    with pytest.raises(SpecfleetError) as error:
        parse(raw, ids, 10, "pool", TABLE)
    assert error.value.code == code
    answer = refused(raw, len(ids), error.value).answer
    assert answer is not None
    assert (answer["ok"], answer["code"], answer["kind"]) == (False, code, kind)


# Settings


def test_settings() -> None:
    settings = Settings.parse(
        '{"store": "memory://p", "layers": [1, 4], "extras": ["teacher_lse"], "dtype": "float16"}'
    )
    assert (settings.layers, settings.extras, settings.final_state) == ((1, 4), ("teacher_lse",), "post_norm")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not JSON"),
        ("[]", "an object"),
        ('{"layers": [1]}', "store"),
        ('{"store": "memory://p", "layers": [1], "layer": 2}', "an object"),
        ('{"store": "memory://p", "layers": [4, 1]}', "ascend"),
        ('{"store": "memory://p", "layers": [-1]}', "layer number"),
        ('{"store": "memory://p", "layers": []}', "at least one"),
        ('{"store": "memory://p", "layers": [1], "dtype": "int8"}', "int8"),
        ('{"store": "memory://p", "layers": [1], "final_state": "pre_norm"}', "pre_norm"),
        ('{"store": "memory://p", "layers": [1], "extras": ["logits"]}', "logits"),
        ('{"store": "memory://p", "layers": [1], "pending_bytes": 0}', "pending_bytes"),
    ],
)
def test_settings_that_make_no_sense(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as error:
        Settings.parse(text)
    assert error.value.code == "SF-SGLANG-SETTINGS"


# The version table


def test_a_changed_function_is_found(tmp_path: Path) -> None:
    source = "class A:\n    x = 1\n\n    def f(self, n: int = 0):\n        return n\n"
    (tmp_path / "m.py").write_text(source)
    tested = measure(tmp_path, "m.py:A.f")
    assert tested is not None
    assert tested.parameters == "self, n: int=0"
    assert tested.target == "sglang.srt.m.A.f"
    (tmp_path / "m.py").write_text("# moved\n\n" + source + "\n\ndef g(): ...\n")
    assert all(row.ok for row in compare(tmp_path, (tested,)))
    for changed in (
        source.replace("return n", "return n + 1"),
        source.replace("= 0", "= 1"),
        source.replace("f(", "h("),
    ):
        (tmp_path / "m.py").write_text(changed)
        assert not any(row.ok for row in compare(tmp_path, (tested,)))
    (row,) = compare(tmp_path, (Function("gone.py:f", "", "0"),))
    assert row.found == "absent"


def test_only_tested_versions() -> None:
    assert tuple(TESTED) == RELEASES
    assert functions_of("0.5.14") == TESTED["0.5.14"]
    with pytest.raises(HostError) as error:
        functions_of("0.5.15")
    assert error.value.code == "SF-SGLANG-VERSION"
