"""Master and owner are killed with -9 while stores are open; stores must say so and recover by themselves."""

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

import pytest
from fixtures.pool import MooncakePool
from fixtures.store_suite import assert_same, put, sample

from specfleet.contracts.errors import FeatureLostError, StoreError, StoreFullError
from specfleet.store.base import FeatureStore
from specfleet.store.factory import open_store

pytestmark = [pytest.mark.integration, pytest.mark.chaos]

T = TypeVar("T")


@pytest.fixture
def pool() -> Iterator[MooncakePool]:
    pool = MooncakePool(64 << 20)
    try:
        pool.start()
        yield pool
    finally:
        pool.stop()


@pytest.fixture(params=["shared-memory", "tcp"])
def store(request: pytest.FixtureRequest, pool: MooncakePool) -> Iterator[FeatureStore]:
    store = open_store(pool.url(shared_memory=request.param == "shared-memory", buffer_bytes=32 << 20))
    yield store
    store.close()


def eventually(call: Callable[[], T], within_s: float = 30.0) -> T:
    """Calls until it succeeds; infrastructure errors and back-pressure are waited out, as services do."""
    deadline = time.monotonic() + within_s
    while True:
        try:
            return call()
        except FeatureLostError:
            raise
        except StoreError as error:
            if time.monotonic() > deadline:
                raise AssertionError(f"no recovery within {within_s} s") from error
            threading.Event().wait(0.05)


def assert_works(store: FeatureStore) -> None:
    ref = eventually(lambda: put(store, sample(seed=9)))
    assert_same(eventually(lambda: store.get(ref)), sample(seed=9))
    assert store.release(ref) == []


def test_master_killed_and_restarted(pool: MooncakePool, store: FeatureStore) -> None:
    ref = put(store, sample())
    kept = store.get(ref)
    pool.kill_master()
    for call in (lambda: put(store, sample()), lambda: store.get(ref)):
        with pytest.raises(StoreError) as raised:
            call()
        assert not isinstance(raised.value, FeatureLostError | StoreFullError), raised.value
    pool.start_master()
    assert_works(store)
    with pytest.raises(FeatureLostError):  # the master forgot every object; the ledger has it captured again
        eventually(lambda: store.get(ref))
    assert_same(kept, sample())  # what was read before stays valid over the reconnection


def test_owner_killed_and_restarted_after_its_time_to_live(pool: MooncakePool, store: FeatureStore) -> None:
    ref = put(store, sample())
    pool.kill_owner()
    with pytest.raises(StoreError):
        store.get(ref)
    with pytest.raises(StoreError):
        put(store, sample())
    gone = time.monotonic() + 30
    while store.stats().capacity_bytes:  # until the master has given the owner up
        assert time.monotonic() < gone
        threading.Event().wait(0.1)
    pool.start_owner()
    assert_works(store)
    with pytest.raises(FeatureLostError):
        eventually(lambda: store.get(ref))


def test_owner_restarted_at_once(pool: MooncakePool, store: FeatureStore) -> None:
    """Faster than the client's ping and the master's time to live: the hardest case for a shared-memory client."""
    ref = put(store, sample())
    pool.kill_owner()
    pool.start_owner()
    assert_works(store)
    with pytest.raises(FeatureLostError):
        eventually(lambda: store.get(ref))


def test_threads_ride_out_a_master_restart(pool: MooncakePool, store: FeatureStore) -> None:
    """Writers and readers at work when the master dies: samples are read back right or lost by name, never wrong."""
    stop = threading.Event()
    rounds, lost, wrong = [0], [0], []

    def work(seed: int) -> None:
        while not stop.is_set():
            try:
                ref = eventually(partial(put, store, sample(seed=seed)))
                assert_same(eventually(partial(store.get, ref)), sample(seed=seed))
                eventually(partial(store.release, ref))
                rounds[0] += 1
            except FeatureLostError:
                lost[0] += 1
            except Exception as error:
                wrong.append(error)
                return

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    pool.kill_master()
    pool.start_master()
    resumed = rounds[0]
    deadline = time.monotonic() + 40
    while rounds[0] < resumed + 20 and not wrong and time.monotonic() < deadline:
        threading.Event().wait(0.05)
    stop.set()
    for thread in threads:
        thread.join(60)
    assert wrong == []
    assert rounds[0] >= resumed + 20
