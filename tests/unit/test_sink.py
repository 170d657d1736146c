"""The plugin's sink: from rows of batches to published objects, each capture with an outcome of its own."""

import base64
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch

from specfleet.capture.sglang_plugin.copies import Copy, HostCopier, Pair
from specfleet.capture.sglang_plugin.hooks import finite_rows
from specfleet.capture.sglang_plugin.request import Origin, parse
from specfleet.capture.sglang_plugin.sink import FINITE, Capture, Sink, Span
from specfleet.contracts.capture import feature_table
from specfleet.contracts.errors import StoreError, StoreFullError
from specfleet.contracts.ids import parse_sample_id
from specfleet.store.base import Sample
from specfleet.store.memory import MemoryStore
from specfleet.wire.records_pb2 import CaptureContract, FeatureSpec, SampleRef, TaskAttempt

TABLE = feature_table(CaptureContract(layers=[0, 2], final_state="post_norm", dtype="float32", hidden_size=4))
ORIGIN = Origin("pool", (0, 2), "sglang 0.5.14", "specfleet 0.1.0")
BYTES_PER_TOKEN = 4 + 1 + 12 * 4


class Pool(MemoryStore):
    """Says when a put was refused, and how many samples came at once."""

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__("pool", capacity_bytes)
        self.refused = threading.Event()
        self.batches: list[int] = []

    def put_many(self, samples: Sequence[Sample]) -> list[list[FeatureSpec] | StoreError]:
        self.batches.append(len(samples))
        return super().put_many(samples)

    def put(self, attempt: TaskAttempt, tensors: Mapping[str, torch.Tensor]) -> list[FeatureSpec]:
        try:
            return super().put(attempt, tensors)
        except StoreFullError:
            self.refused.set()
            raise


class HeldCopy:
    """A copy that ends when it is told to, like one of a batch that a GPU still works on."""

    def __init__(self) -> None:
        self.end = threading.Event()

    def done(self) -> bool:
        return self.end.is_set()

    def wait(self) -> float:
        assert self.end.wait(10)
        return 1.0


class HeldCopier(HostCopier):
    """Holds every copy."""

    def __init__(self) -> None:
        self.held: list[HeldCopy] = []

    def start(self, pairs: Iterable[Pair], sources: Sequence[torch.Tensor]) -> Copy:
        super().start(pairs, sources)
        self.held.append(HeldCopy())
        return self.held[-1]


@pytest.fixture
def pool() -> Pool:
    return Pool(4096)


@pytest.fixture
def sink(pool: Pool) -> Iterator[Sink]:
    sink = Sink(pool, TABLE, ORIGIN, HostCopier(), store_full_s=30.0)
    yield sink
    sink.close()


def begin(sink: Sink, index: int, tokens: int) -> Capture:
    ids = list(range(tokens))
    wish = {
        "sample": f"run/e0000-p{index:09d}/a1",
        "store": "pool",
        "loss_mask": base64.b64encode(bytes(i % 2 for i in ids)).decode(),
    }
    return sink.begin(f"r{index}", parse(wish, ids, 1000, "pool", TABLE), ids)


def states(rows: int, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    aux, final = torch.randn(rows, 8, generator=generator), torch.randn(rows, 4, generator=generator)
    return {"aux_states": aux, "final_state": final, FINITE: torch.ones(rows, dtype=torch.bool)}


def answer(sink: Sink, capture: Capture) -> dict[str, Any]:
    """Waits for the sink's thread."""
    while capture.answer is None:
        assert sink._writer.is_alive()
        sink._writer.join(0.005)
    return capture.answer


def read(pool: Pool, found: dict[str, Any]) -> dict[str, torch.Tensor]:
    features = [
        FeatureSpec(
            name=name, key=row["key"], dtype=row["dtype"], shape=row["shape"], num_bytes=row["bytes"], checksum=row["checksum"]
        )
        for name, row in found["features"].items()
    ]  # fmt: skip
    return pool.get(SampleRef(attempt=parse_sample_id(found["sample"]), store="pool", features=features))


def test_chunks_of_two_prompts_in_shared_batches(sink: Sink, pool: Pool) -> None:
    first, second = begin(sink, 1, 5), begin(sink, 2, 3)
    one, two = states(4, seed=1), states(6, seed=2)
    # Rows of others lie before, between and after.
    sink.take([Span(first, 1, 0, 3)], one)
    sink.take([Span(second, 0, 0, 3), Span(first, 4, 3, 2)], two)
    for capture, aux in (
        (first, torch.cat([one["aux_states"][1:4], two["aux_states"][4:6]])),
        (second, two["aux_states"][:3]),
    ):
        found = answer(sink, capture)
        assert found["ok"], found
        assert found["num_tokens"] == len(aux)
        assert found["layers"] == (0, 2)
        assert set(found["seconds"]) == {"copy", "wait", "hash", "put"}
        assert min(found["seconds"].values()) >= 0
        tensors = read(pool, found)
        assert torch.equal(tensors["aux_states"], aux)
        assert tensors["input_ids"].tolist() == list(range(len(aux)))
        assert tensors["loss_mask"].tolist() == [i % 2 for i in range(len(aux))]
        assert list(tensors) == list(TABLE)
    assert sorted(sink.published()) == ["r1", "r2"]
    assert sink.published() == []


def test_rows_that_were_not_computed_fail_the_capture(sink: Sink) -> None:
    capture = begin(sink, 1, 5)
    sink.take([Span(capture, 0, 2, 3)], states(3, seed=1))
    assert not capture.complete
    assert capture.failed is not None
    assert capture.failed.code == "SF-SGLANG-SHORT"


def test_a_bad_capture_leaves_its_neighbours_in_the_batch_alone(pool: Pool) -> None:
    """One with NaN, one whose keys exist, one that does not fit, among good ones: one put, and the pool holds the good ones."""
    copier = HeldCopier()
    sink = Sink(pool, TABLE, ORIGIN, copier, store_full_s=0.0)
    pool.put(parse_sample_id("run/e0000-p000000003/a1"), {"input_ids": torch.zeros(2)})
    lengths = {1: 3, 2: 4, 3: 5, 4: 80, 5: 6}
    captures = {index: begin(sink, index, tokens) for index, tokens in lengths.items()}
    rows, first, spans = states(sum(lengths.values()), seed=1), 0, []
    for index, tokens in lengths.items():
        spans.append(Span(captures[index], first, 0, tokens))
        first += tokens
    rows[FINITE][lengths[1] + 1] = False  # of the second
    sink.take(spans, rows)
    copier.held[0].end.set()
    answers = {index: answer(sink, capture) for index, capture in captures.items()}
    codes = {index: (found.get("code", ""), found.get("kind", "")) for index, found in answers.items()}
    assert codes == {
        1: ("", ""),
        2: ("SF-CAPTURE-NONFINITE", "sample"),
        3: ("SF-STORE-KEY-EXISTS", "infra"),
        4: ("SF-STORE-FULL", "infra"),
        5: ("", ""),
    }
    assert "1 of 4 tokens are NaN or infinite, the first at token 1" in answers[2]["message"]
    assert pool.batches == [4]
    assert pool.stats().used_bytes == 8 + (3 + 6) * BYTES_PER_TOKEN
    for index in (1, 5):
        first = spans[index - 1].first
        assert torch.equal(
            read(pool, answers[index])["final_state"], rows["final_state"][first : first + lengths[index]]
        )
    sink.close()


def test_what_is_ready_goes_together_and_waits_for_nothing_else(pool: Pool) -> None:
    copier = HeldCopier()
    sink = Sink(pool, TABLE, ORIGIN, copier, store_full_s=0.0)
    captures = [begin(sink, index, 2) for index in range(5)]
    for batch in (captures[:3], captures[3:]):
        sink.take([Span(capture, 2 * place, 0, 2) for place, capture in enumerate(batch)], states(6, seed=1))
    copier.held[0].end.set()
    for capture in captures[:3]:
        assert answer(sink, capture)["seconds"]["copy"] == pytest.approx(1 / 3)
    assert captures[3].answer is captures[4].answer is None
    copier.held[1].end.set()
    assert all(answer(sink, capture)["ok"] for capture in captures)
    assert pool.batches == [3, 2]
    sink.close()


def test_a_full_pool_is_waited_for_but_not_for_the_abandoned(sink: Sink, pool: Pool) -> None:
    filler = pool.put(parse_sample_id("run/e0001-p000000000/a1"), {"x": torch.zeros(4000, dtype=torch.uint8)})
    abandoned, patient = begin(sink, 1, 4), begin(sink, 2, 4)
    for capture in (abandoned, patient):
        sink.take([Span(capture, 0, 0, 4)], states(4, seed=1))
    assert pool.refused.wait(10)
    assert abandoned.answer is None
    sink.abandon(lambda name: name == "r1")
    assert answer(sink, abandoned)["code"] == "SF-SGLANG-ABORTED"
    assert patient.answer is None
    pool.remove([filler[0].key])
    assert answer(sink, patient)["ok"]


def test_an_attempt_is_stored_once(sink: Sink) -> None:
    captures = [begin(sink, 1, 2), begin(sink, 1, 2)]
    for capture in captures:
        sink.take([Span(capture, 0, 0, 2)], states(2, seed=1))
    first, second = (answer(sink, capture) for capture in captures)
    assert first["ok"]
    assert (second["code"], second["kind"]) == ("SF-STORE-KEY-EXISTS", "infra")


def test_a_store_that_breaks_unexpectedly_fails_the_batch_and_no_later_one(
    sink: Sink, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def put_many(_samples: Sequence[Sample]) -> list[list[FeatureSpec] | StoreError]:
        raise ZeroDivisionError("a bug")

    with monkeypatch.context() as broken:
        broken.setattr(pool, "put_many", put_many)
        capture = begin(sink, 1, 2)
        sink.take([Span(capture, 0, 0, 2)], states(2, seed=1))
        found = answer(sink, capture)
        assert (found["code"], found["message"]) == ("SF-SGLANG-SINK", "ZeroDivisionError: a bug")
    capture = begin(sink, 2, 2)
    sink.take([Span(capture, 0, 0, 2)], states(2, seed=1))
    assert answer(sink, capture)["ok"]


def test_pages_are_locked_for_what_may_be_under_way_with_room_for_gaps() -> None:
    asked: list[int] = []

    class Lending(MemoryStore):
        def reserve(self, num_bytes: int, page_lock: Any) -> None:
            asked.append(num_bytes)
            raise StoreError("SF-STORE-UNREACHABLE", "not there yet")

    sink = Sink(Lending("lending"), TABLE, ORIGIN, HostCopier(), store_full_s=0.0)
    sink.reserve(1000)  # the first put reaches the store, or says why not
    assert asked == [1250]
    sink.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_one_bad_element_marks_its_row(dtype: torch.dtype) -> None:
    aux, final = (torch.full((6, width), torch.finfo(dtype).max, dtype=dtype) for width in (33, 11))
    aux[1, 32], aux[2, 0], final[4, 5] = float("nan"), float("-inf"), float("inf")
    assert finite_rows([aux, final]).tolist() == [True, False, False, True, False, True]
