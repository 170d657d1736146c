"""The common promises of a store against a real Mooncake, over shared memory and over TCP."""

import sys
from collections.abc import Iterator

import pytest
import torch
from fixtures.pool import MooncakePool
from fixtures.store_suite import CAPACITY, StoreConformance, assert_same, new_attempt, put, sample

from specfleet.contracts.errors import StoreError
from specfleet.store.base import FeatureStore
from specfleet.store.factory import open_store
from specfleet.store.mooncake import MooncakeStore, prefault
from specfleet.store.processes import read_metrics

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def pool() -> Iterator[MooncakePool]:
    pool = MooncakePool(CAPACITY)
    try:
        pool.start()
        yield pool
    finally:
        pool.stop()


class OpenStores:
    """One open store per kind for all tests: Mooncake takes a second to close a client."""

    def __init__(self, pool: MooncakePool) -> None:
        self.urls = {
            "shared-memory": pool.url(buffer_bytes=128 << 20),
            "tcp": pool.url(shared_memory=False, buffer_bytes=128 << 20),
            # 13 MiB is the largest object of the suite: nearly nothing can be lent and threads wait for one another.
            "small-buffer": pool.url(buffer_bytes=28 << 20),
        }
        self.stores: dict[str, FeatureStore] = {}

    def get(self, kind: str) -> FeatureStore:
        if kind not in self.stores or self.stores[kind]._closing.is_set():  # type: ignore[attr-defined]
            self.stores[kind] = open_store(self.urls[kind])
        return self.stores[kind]


@pytest.fixture(scope="module")
def stores(pool: MooncakePool) -> Iterator[OpenStores]:
    stores = OpenStores(pool)
    yield stores
    for store in stores.stores.values():
        store.close()


@pytest.fixture(params=["shared-memory", "tcp", "small-buffer"])
def store(request: pytest.FixtureRequest, stores: OpenStores) -> Iterator[FeatureStore]:
    yield stores.get(request.param)
    cleaner = stores.get("tcp")
    assert isinstance(cleaner, MooncakeStore)
    with cleaner._session() as connection:
        connection.client.remove_all(True)


class TestMooncakeStore(StoreConformance):
    pass


def test_everything_is_pinned_and_nothing_is_evicted(store: FeatureStore, pool: MooncakePool) -> None:
    refs = [put(store, {"x": torch.full((1 << 20,), seed, dtype=torch.uint8)}) for seed in range(60)]
    assert read_metrics(f"127.0.0.1:{pool.metrics_port}")["master_key_count"] == 60
    for seed, ref in enumerate(refs):
        assert (store.get(ref)["x"] == seed).all()
    assert read_metrics(f"127.0.0.1:{pool.metrics_port}").get("master_successful_evictions_total", 0) == 0


def test_views_fill_the_buffer_and_reads_go_on_with_copies(pool: MooncakePool) -> None:
    store = open_store(pool.url(buffer_bytes=8 << 20))
    ref = put(store, {"x": torch.arange(1 << 18, dtype=torch.int32)})  # 1 MiB
    kept = [store.get(ref)["x"] for _ in range(12)]
    assert len({tensor.data_ptr() for tensor in kept}) == 12
    for tensor in kept:
        assert torch.equal(tensor, torch.arange(1 << 18, dtype=torch.int32))
    assert isinstance(store, MooncakeStore)
    connection = store._connection
    assert connection is not None
    assert (connection.views.in_use(), connection.staging.in_use()) == (4, 0)
    del kept, tensor
    assert connection.views.in_use() == 0
    store.release(ref)
    store.close()


def test_an_object_larger_than_the_buffer_says_what_to_set(pool: MooncakePool) -> None:
    store = open_store(pool.url(buffer_bytes=8 << 20))
    with pytest.raises(StoreError, match=r"SF-STORE-OBJECT-TOO-LARGE.*set buffer=\d+"):
        put(store, {"x": torch.zeros(5 << 20, dtype=torch.uint8)})
    assert store.stats().used_bytes == 0
    store.close()


def test_tensors_from_empty_are_written_without_a_copy(pool: MooncakePool) -> None:
    store = open_store(pool.url(buffer_bytes=8 << 20))
    assert store.remove(["pool/none"]) == []  # connects: before that there is nothing to lend
    tensor = store.empty([4 << 20], torch.uint8)  # all the lent half: copying it too would need the other half
    tensor.fill_(9)
    assert isinstance(store, MooncakeStore)
    connection = store._connection
    assert connection is not None
    block = connection.staging.acquire(4 << 20, 1)  # no transfer memory left for copies
    ref = put(store, {"x": tensor})
    connection.staging.release(block)
    del tensor
    assert int(store.get(ref)["x"].sum()) == 9 * (4 << 20)
    store.release(ref)
    store.close()


def test_prefault_touches_all_and_leaves_nothing(pool: MooncakePool) -> None:
    assert prefault(pool.url()) == CAPACITY
    metrics = read_metrics(f"127.0.0.1:{pool.metrics_port}")
    assert metrics["master_key_count"] == 0
    assert metrics["master_total_capacity_bytes"] == CAPACITY


def test_a_reader_over_tcp_sees_what_a_local_writer_put(pool: MooncakePool) -> None:
    writer, reader = open_store(pool.url()), open_store(pool.url(shared_memory=False))
    ref = put(writer, sample(seed=3), new_attempt(attempt=7))
    assert_same(reader.get(ref), sample(seed=3))
    assert reader.release(ref) == []
    writer.close()
    reader.close()
    assert "/a7/" in ref.features[0].key
    assert "torch" in sys.modules
