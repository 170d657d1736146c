"""A store in a process of its own, before a real Mooncake and before a directory."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fixtures.pool import MooncakePool
from fixtures.store_suite import CAPACITY, StoreConformance, assert_same, new_attempt, put, ref_of, sample

from specfleet.contracts.errors import StoreError, StoreFullError
from specfleet.store.apart import StoreApart
from specfleet.store.base import FeatureStore
from specfleet.store.mooncake import MooncakeStore

pytestmark = pytest.mark.integration

RESERVED = 32 << 20


@pytest.fixture(scope="module")
def pool() -> Iterator[MooncakePool]:
    pool = MooncakePool(CAPACITY)
    try:
        pool.start()
        yield pool
    finally:
        pool.stop()


def nothing() -> None:
    """Unlocks no pages."""


@pytest.fixture(scope="module")
def stores(pool: MooncakePool) -> Iterator[list[StoreApart]]:
    """One for all tests: each takes seconds to start."""
    stores: list[StoreApart] = []
    yield stores
    for store in stores:
        store.close()


@pytest.fixture(scope="module")
def cleaner(pool: MooncakePool) -> Iterator[MooncakeStore]:
    store = MooncakeStore("pool", f"127.0.0.1:{pool.master_port}")
    yield store
    store.close()


@pytest.fixture
def mooncake(stores: list[StoreApart], pool: MooncakePool) -> StoreApart:
    if not stores or stores[-1]._closed:
        stores.append(StoreApart(pool.url(buffer_bytes=128 << 20)))
        stores[-1].reserve(RESERVED, lambda _address, _num_bytes: nothing)
    return stores[-1]


class TestMooncakeApart(StoreConformance):
    @pytest.fixture
    def store(self, mooncake: StoreApart, cleaner: MooncakeStore) -> Iterator[FeatureStore]:
        yield mooncake
        with cleaner._session() as connection:
            connection.client.remove_all(True)


def memory_at(address: int) -> str:
    """The line of /proc/self/maps."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        if start <= address < end:
            return line
    raise AssertionError(hex(address))


def test_tensors_lie_in_memory_that_mooncake_registered(mooncake: StoreApart) -> None:
    assert "mooncake" in memory_at(mooncake.empty([100, 8], torch.bfloat16).data_ptr())
    filling = [mooncake.empty([RESERVED // 2], torch.uint8) for _ in range(2)]
    assert "mooncake" not in memory_at(mooncake.empty([1], torch.uint8).data_ptr())  # nothing is left
    del filling
    assert "mooncake" in memory_at(mooncake.empty([RESERVED // 2], torch.uint8).data_ptr())


def test_pages_are_locked_where_tensors_lie_until_the_store_is_closed(tmp_path: Path) -> None:
    locked: list[tuple[int, int]] = []

    def page_lock(address: int, num_bytes: int):  # type: ignore[no-untyped-def]
        locked.append((address, num_bytes))
        return locked.clear

    store = StoreApart(f"file://{tmp_path}/pool")
    store.reserve(100_000, page_lock)
    [(address, num_bytes)] = locked
    assert num_bytes >= 100_000
    tensor = store.empty([1000], torch.float32)
    assert address <= tensor.data_ptr() <= address + num_bytes - tensor.nbytes
    tensors = {"states": tensor.fill_(2.5), "ordinary": torch.arange(5)}
    assert_same(store.get(put(store, tensors)), tensors)
    store.close()
    assert not locked
    assert float(tensor.sum()) == 2500  # what was handed out stays
    with pytest.raises(StoreError, match="SF-STORE-CLOSED"):
        put(store, sample())


def test_each_sample_has_an_outcome_of_its_own(tmp_path: Path) -> None:
    store = StoreApart(f"file://{tmp_path}/pool?capacity={300_000}")
    first, large, strided, last = (new_attempt() for _ in range(4))
    outcomes = store.put_many(
        [
            (first, {"x": torch.ones(10)}),
            (large, {"x": torch.ones(100_000)}),
            (strided, {"x": torch.ones(4, 4)[:, 1]}),
            (first, {"x": torch.ones(10)}),
            (last, {"x": torch.full([10], 3.0)}),
        ]
    )
    assert isinstance(outcomes[1], StoreFullError)
    assert [outcome.code for outcome in outcomes[1:4] if isinstance(outcome, StoreError)] == [
        "SF-STORE-FULL",
        "SF-STORE-LAYOUT",
        "SF-STORE-KEY-EXISTS",
    ]
    assert isinstance(outcomes[4], list)
    assert store.get(ref_of(store, last, outcomes[4]))["x"].tolist() == [3.0] * 10
    store.close()


def test_a_killed_process_fails_one_call_and_the_memory_serves_the_next(mooncake: StoreApart) -> None:
    tensors = {"states": mooncake.empty([50, 8], torch.float32).fill_(1.5)}
    process = mooncake._process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    with pytest.raises(StoreError, match="SF-STORE-PROCESS"):
        put(mooncake, tensors)
    assert_same(mooncake.get(put(mooncake, tensors)), tensors)
    assert "mooncake" in memory_at(mooncake.empty([10], torch.uint8).data_ptr())


def test_a_process_that_does_not_start_fails_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it would have had memory of an earlier one to take over."""
    store = StoreApart(f"file://{tmp_path}/pool")
    with monkeypatch.context() as broken:
        broken.setattr("sys.executable", "/bin/false")
        with pytest.raises(StoreError, match="SF-STORE-PROCESS"):
            store.reserve(1000, lambda _address, _num_bytes: nothing)
    store.reserve(1000, lambda _address, _num_bytes: nothing)
    tensors = {"x": store.empty([10], torch.float32).fill_(1.0)}
    assert store._process is not None
    store._process.kill()
    store._process.wait()
    with monkeypatch.context() as broken:
        broken.setattr("sys.executable", "/bin/false")
        for _ in range(2):
            with pytest.raises(StoreError, match="SF-STORE-PROCESS"):
                put(store, tensors)
    assert_same(store.get(put(store, tensors)), tensors)
    store.close()
