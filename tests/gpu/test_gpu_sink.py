"""The plugin's sink on CUDA: captures land in page-locked memory of a real Mooncake, without holding anybody up."""

import base64
import mmap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.mooncake_pool import mooncake_pool
from specfleet.capture.sglang_plugin.copies import CudaCopier
from specfleet.capture.sglang_plugin.hooks import finite_rows
from specfleet.capture.sglang_plugin.request import Origin, parse
from specfleet.capture.sglang_plugin.sink import FINITE, Capture, Sink, Span
from specfleet.contracts.capture import feature_table
from specfleet.contracts.ids import parse_sample_id
from specfleet.store.base import FeatureStore
from specfleet.store.factory import open_store
from specfleet.store.mooncake import MooncakeStore
from specfleet.wire.records_pb2 import CaptureContract, FeatureSpec, SampleRef

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

HIDDEN = 256
TABLE = feature_table(CaptureContract(layers=[0, 2], final_state="post_norm", dtype="bfloat16", hidden_size=HIDDEN))
ORIGIN = Origin("pool", (0, 2), "sglang", "specfleet")
PENDING_BYTES = 64 << 20
# Cycles that a stream is kept busy for: a tenth of a second or so.
BUSY = 200_000_000


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with mooncake_pool("pool", 256 << 20) as url:
        yield url


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def copier(device: torch.device) -> CudaCopier:
    return CudaCopier(device)


def begin(sink: Sink, index: int, tokens: int) -> Capture:
    ids = list(range(tokens))
    wish = {
        "sample": f"run/e0000-p{index:09d}/a1",
        "store": "pool",
        "loss_mask": base64.b64encode(bytes(tokens)).decode(),
    }
    return sink.begin(f"r{index}", parse(wish, ids, 100_000, "pool", TABLE), ids)


def states(rows: int, device: torch.device) -> dict[str, torch.Tensor]:
    aux, final = (torch.randn(rows, width * HIDDEN, device=device, dtype=torch.bfloat16) for width in (2, 1))
    return {"aux_states": aux, "final_state": final, FINITE: torch.ones(rows, dtype=torch.bool, device=device)}


def answer(sink: Sink, capture: Capture) -> dict[str, Any]:
    while capture.answer is None:
        assert sink._writer.is_alive()
        sink._writer.join(0.005)
    return capture.answer


def read(store: FeatureStore, found: dict[str, Any]) -> dict[str, torch.Tensor]:
    features = [
        FeatureSpec(
            name=name, key=row["key"], dtype=row["dtype"], shape=row["shape"], num_bytes=row["bytes"], checksum=row["checksum"]
        )
        for name, row in found["features"].items()
    ]  # fmt: skip
    ref = SampleRef(attempt=parse_sample_id(found["sample"]), store="pool", features=features)
    tensors = store.get(ref)
    assert store.release(ref) == []
    return tensors


def captured(sink: Sink, index: int, tokens: int, device: torch.device) -> None:
    """One prompt in two chunks, rows of others around them; what is read back equals what was on the device."""
    capture = begin(sink, index, tokens)
    assert capture.tensors["aux_states"].is_pinned()
    half = tokens // 2
    first, second = states(half + 3, device), states(tokens - half + 5, device)
    sink.take([Span(capture, 3, 0, half)], first)
    sink.take([Span(capture, 0, half, tokens - half)], second)
    expected = {
        name: torch.cat([first[name][3:], second[name][: tokens - half]]).cpu()
        for name in ("aux_states", "final_state")
    }
    found = answer(sink, capture)
    assert found["ok"], found
    assert found["seconds"]["copy"] > 0
    tensors = read(sink.store, found)
    for name, tensor in expected.items():
        assert torch.equal(tensors[name], tensor), name
    assert tensors["input_ids"].tolist() == list(range(tokens))


def test_captures_land_in_page_locked_memory_of_the_store(url: str, copier: CudaCopier, device: torch.device) -> None:
    store = open_store(url)
    assert isinstance(store, MooncakeStore)
    sink = Sink(store, TABLE, ORIGIN, copier, store_full_s=10.0)
    sink.reserve(PENDING_BYTES)
    connection = store._connection
    assert connection is not None
    assert connection.views.size >= PENDING_BYTES
    capture = begin(sink, 1, 1000)
    for tensor in capture.tensors.values():
        assert connection.lent(tensor.data_ptr(), tensor.nbytes)
        assert tensor.is_pinned()
    del capture, tensor
    for index, tokens in enumerate((2, 3, 513, 4096), start=2):
        captured(sink, index, tokens, device)
    sink.close()


def test_copies_hold_up_nobody(url: str, copier: CudaCopier, device: torch.device) -> None:
    """While the device is busy with what is captured, copies are only started; dropping the states at once changes nothing."""
    sink = Sink(open_store(url), TABLE, ORIGIN, copier, store_full_s=10.0)
    sink.reserve(PENDING_BYTES)
    capture = begin(sink, 20, 2048)
    rows = states(2048, device)
    expected = {name: tensor.cpu() for name, tensor in rows.items()}
    torch.cuda.synchronize()
    torch.cuda._sleep(BUSY)
    rows = {name: tensor.clone() for name, tensor in rows.items()}
    sink.take([Span(capture, 0, 0, 2048)], rows)
    assert not capture.copied()
    assert capture.answer is None
    del rows
    for _ in range(8):  # may not take the memory that the copies still read
        torch.zeros(2048, 2 * HIDDEN, device=device, dtype=torch.bfloat16)
    found = answer(sink, capture)
    assert found["ok"], found
    tensors = read(sink.store, found)
    assert torch.equal(tensors["aux_states"], expected["aux_states"])
    sink.close()


def test_copies_of_a_capture_that_ended_early_spoil_no_other(
    url: str, copier: CudaCopier, device: torch.device
) -> None:
    sink = Sink(open_store(url), TABLE, ORIGIN, copier, store_full_s=10.0)
    sink.reserve(PENDING_BYTES)
    ended = begin(sink, 25, 600)
    address = ended.tensors["input_ids"].data_ptr()
    torch.cuda._sleep(BUSY)
    sink.take([Span(ended, 0, 0, 500)], states(500, device))
    sink.forget("r25")
    del ended
    capture = begin(sink, 26, 600)
    assert capture.tensors["input_ids"].data_ptr() == address  # the same memory, into which copies are still to come
    rows = states(600, device)
    sink.take([Span(capture, 0, 0, 600)], rows)
    tensors = read(sink.store, answer(sink, capture))
    assert tensors["input_ids"].tolist() == list(range(600))
    assert torch.equal(tensors["final_state"], rows["final_state"].cpu())
    sink.close()


def test_what_the_store_does_not_lend_is_page_locked_all_the_same(
    url: str, copier: CudaCopier, device: torch.device, tmp_path: Path
) -> None:
    """By a store without such memory, or before it is connected."""
    for index, store_url in ((30, f"file://{tmp_path}/pool"), (31, f"{url}&buffer={4 << 20}"), (32, url)):
        sink = Sink(open_store(store_url), TABLE, ORIGIN, copier, store_full_s=10.0)
        if index == 30:
            sink.reserve(PENDING_BYTES)
        captured(sink, index, 1500, device)
        sink.close()


def test_a_replaced_connection_is_page_locked_again(url: str, copier: CudaCopier, device: torch.device) -> None:
    store = open_store(url)
    assert isinstance(store, MooncakeStore)
    sink = Sink(store, TABLE, ORIGIN, copier, store_full_s=10.0)
    sink.reserve(PENDING_BYTES)
    old = store._connection
    assert old is not None
    store._broken(old, "a test", -800)
    captured(sink, 40, 700, device)  # in memory of its own: the store lends none now
    assert store._connection not in (None, old)
    captured(sink, 41, 700, device)
    assert store.empty([1 << 20], torch.uint8).is_pinned()
    del old
    sink.close()


def test_locking_that_fails_is_reported_and_poisons_nothing(
    copier: CudaCopier, device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    memory = torch.frombuffer(mmap.mmap(-1, 1 << 20), dtype=torch.uint8)
    unlock = copier.page_lock(memory.data_ptr(), memory.nbytes)
    assert memory.is_pinned()
    again: Callable[[], None] = copier.page_lock(memory.data_ptr(), memory.nbytes)
    assert "cudaHostRegister of 1048576 bytes" in caplog.text
    assert float(torch.ones(8, device=device).sum()) == 8  # CUDA reports no stale error
    again()
    assert memory.is_pinned()
    unlock()
    assert not memory.is_pinned()
    other = torch.zeros(1 << 20, dtype=torch.uint8)
    assert copier.locked(other).is_pinned()
    assert not other.is_pinned()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_one_bad_element_marks_its_row(device: torch.device, dtype: torch.dtype) -> None:
    aux, final = (torch.full((6, width), torch.finfo(dtype).max, dtype=dtype, device=device) for width in (3000, 1000))
    aux[1, 2999], aux[2, 0], final[4, 500] = float("nan"), float("-inf"), float("inf")
    assert finite_rows([aux, final]).tolist() == [True, False, False, True, False, True]
