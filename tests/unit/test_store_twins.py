"""The store in memory and in a directory: the common promises, and what only a directory can show."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fixtures.store_suite import CAPACITY, StoreConformance, assert_same, new_attempt, put, sample

from specfleet.contracts.errors import ConfigError, FeatureLostError, HostError, StoreError, StoreFullError
from specfleet.store.base import FeatureStore
from specfleet.store.connection import _library_error
from specfleet.store.factory import open_store


class TestMemoryStore(StoreConformance):
    @pytest.fixture
    def store(self) -> Iterator[FeatureStore]:
        store = open_store(f"memory://pool?capacity={CAPACITY}")
        yield store
        store.close()


class TestDirectoryStore(StoreConformance):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[FeatureStore]:
        store = open_store(f"file://{tmp_path}/pool?capacity={CAPACITY}")
        yield store
        store.close()


def test_memory_stores_of_one_name_share_a_pool_that_ends_with_the_last() -> None:
    writer, reader = open_store("memory://shared"), open_store("memory://shared")
    ref = put(writer, sample())
    writer.close()
    assert_same(reader.get(ref), sample())
    reader.close()
    fresh = open_store("memory://shared")
    with pytest.raises(FeatureLostError):
        fresh.get(ref)
    fresh.close()


def test_processes_share_a_directory_and_its_count(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/pool?capacity={1 << 20}"
    store = open_store(url)
    script = (
        "import sys, torch; sys.path.insert(0, sys.argv[2])\n"
        "from fixtures.store_suite import put\nfrom specfleet.store.factory import open_store\n"
        "ref = put(open_store(sys.argv[1]), {'x': torch.arange(200_000, dtype=torch.int32)})\n"
        "sys.stdout.buffer.write(ref.SerializeToString())"
    )
    fixtures = str(Path(__file__).parents[1])
    written = subprocess.run([sys.executable, "-c", script, url, fixtures], check=True, capture_output=True).stdout
    from specfleet.wire.records_pb2 import SampleRef

    ref = SampleRef.FromString(written)
    assert store.stats().used_bytes == 800_000
    assert torch.equal(store.get(ref)["x"], torch.arange(200_000, dtype=torch.int32))
    with pytest.raises(StoreFullError, match="800000 of 1048576"):
        put(store, {"x": torch.zeros(250_000, dtype=torch.uint8)})
    store.release(ref)
    assert store.stats().used_bytes == 0
    store.close()


def test_first_to_open_a_directory_recounts_and_clears_what_a_crash_left(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/pool?capacity={1 << 20}"
    store = open_store(url)
    ref = put(store, {"x": torch.zeros(1000, dtype=torch.uint8)})
    store.close()
    folder = (tmp_path / "pool").joinpath(*ref.features[0].key.split("/")[1:-1])
    (folder / ".tmp-0123").write_bytes(b"half")
    (tmp_path / "pool" / ".used").write_bytes(b"%020d" % 999_999)  # a writer died between reserving and writing
    store = open_store(url)
    assert store.stats().used_bytes == 1000
    assert [path.name for path in folder.iterdir()] == ["x"]
    second = open_store(url)  # not the first: leaves the count alone
    (folder / ".tmp-4567").write_bytes(b"being written")
    open_store(url).close()
    assert (folder / ".tmp-4567").exists()
    store.close()
    second.close()


def test_a_directory_reopened_serves_what_it_held(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/pool"
    store = open_store(url)
    ref = put(store, sample(seed=5))
    store.close()
    store = open_store(url)
    assert_same(store.get(ref), sample(seed=5))
    capacity = store.stats().capacity_bytes
    assert capacity > store.stats().used_bytes > 0  # without capacity=: what the file system has
    store.release(ref)
    assert sorted(os.listdir(tmp_path / "pool" / "suite")) == []  # empty folders go
    store.close()


def test_a_truncated_file_is_lost(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}/pool")
    ref = put(store, sample())
    path = (tmp_path / "pool").joinpath(*ref.features[2].key.split("/")[1:])
    os.truncate(path, 100)
    with pytest.raises(FeatureLostError, match=r"expected \d+ bytes, found 100"):
        store.get(ref)
    store.close()


@pytest.mark.parametrize("name", ["../../x", "..", "", ".tmp-1"])
def test_feature_names_cannot_leave_the_directory(tmp_path: Path, name: str) -> None:
    store = open_store(f"file://{tmp_path}/pool")
    with pytest.raises(StoreError, match="SF-STORE-KEY"):
        put(store, {name: torch.ones(3)})
    tensors = {"x y%?": torch.ones(3), "ü": torch.ones(2)}
    assert_same(store.get(put(store, tensors)), tensors)
    assert {path.name for path in tmp_path.iterdir()} == {"pool"}
    store.close()


def test_a_directory_that_cannot_be_made_is_a_host_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(HostError, match="SF-HOST-STORE-DIR"):
        open_store(f"file://{tmp_path}/file/pool")


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("s3://bucket", "unknown scheme 's3'"),
        ("memory://", "needs a name"),
        ("file://relative/dir", "absolute directory"),
        ("file:///", "absolute directory"),
        ("mooncake://host:1", "one NAME"),
        ("mooncake://host:1/a/b", "one NAME"),
        ("mooncake://host:1/a?clients=x:1", "unknown option clients"),
        ("memory://x?capacity=1GB", "capacity='1GB' is not a positive number"),
    ],
)
def test_a_wrong_url_is_explained(url: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"SF-CONFIG-STORE-URL.*{why}"):
        open_store(url)


def test_importing_the_stores_does_not_import_torch_or_mooncake() -> None:
    script = (
        "import sys, specfleet.store.mooncake, specfleet.store.factory, specfleet.store.directory, "
        "specfleet.store.memory; print(sorted({'torch', 'mooncake'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout == "[]\n"


def test_missing_mooncake_names_the_extra() -> None:
    script = (
        "import sys; sys.modules['mooncake'] = None\n"
        "from specfleet.store.factory import open_store\nopen_store('mooncake://127.0.0.1:1/pool')"
    )
    failed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "[SF-HOST-MOONCAKE]" in failed.stderr
    assert "specfleet[mooncake-cpu]" in failed.stderr


def test_missing_libibverbs_names_the_debian_package() -> None:
    error = _library_error("libibverbs.so.1: cannot open shared object file: No such file or directory")
    assert error.code == "SF-HOST-LIBIBVERBS"
    assert "apt-get install libibverbs1" in error.message
    assert _library_error("libcudart.so.12: cannot open").code == "SF-HOST-MOONCAKE"


def test_an_unreachable_pool_is_a_store_error(free_port) -> None:  # type: ignore[no-untyped-def]
    store = open_store(f"mooncake://127.0.0.1:{free_port()}/pool?client=127.0.0.1:{free_port()}&pool=1000")
    with pytest.raises(StoreError, match=r"SF-STORE-UNREACHABLE.*segment owner"):
        store.put(new_attempt(), sample())
    assert store.stats().capacity_bytes == 1000  # the configured one
    store.close()
