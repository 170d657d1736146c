"""How much of Mooncake's own speed a FeatureStore passes on.

    python -m benchmarks.store_throughput [--object-mib 16 64] [--rounds 5] [--tcp]

Starts a master and a pre-faulted owner on loopback and moves batches of objects in alternation through bare
batch_put_from / batch_get_into on registered memory, and through FeatureStore with all its checks (existence before
and after, xxh3-64 both ways). Prints one JSON object; `ratio` is FeatureStore over bare (goal: at least 0.8). `put_copied`
is the same put from ordinary tensors, which must be copied into registered memory first.
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.mooncake_pool import mooncake_pool
from specfleet.contracts.ids import task_key
from specfleet.store.factory import open_store
from specfleet.store.mooncake import MooncakeStore
from specfleet.wire.records_pb2 import SampleRef, TaskAttempt

POOL_BYTES = 1 << 30
BATCH_BYTES = 128 << 20
# One half is lent: it must hold the batch that is put and the one that is read back.
BUFFER_BYTES = 6 * BATCH_BYTES


class Clock:
    """Collects bytes per second of timed calls under a name."""

    def __init__(self) -> None:
        self.rates: dict[str, list[float]] = {}

    def time(self, name: str, num_bytes: int, call: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = call()
        self.rates.setdefault(name, []).append(num_bytes / (time.perf_counter() - start) / 1e9)
        return result

    def median(self, name: str) -> float:
        return statistics.median(self.rates[name])


def bare_round(store: MooncakeStore, tensors: dict[str, torch.Tensor], clock: Clock, tag: str) -> None:
    """The same bytes with nothing but the two transfer calls, on memory this client registered."""
    with store._session() as connection:
        client = connection.client
        keys = [f"bare/{tag}/{name}" for name in tensors]
        addresses = [tensor.data_ptr() for tensor in tensors.values()]
        sizes = [tensor.nbytes for tensor in tensors.values()]
        total = sum(sizes)
        codes = clock.time("bare_put", total, lambda: client.batch_put_from(keys, addresses, sizes, store._config))
        assert set(codes) == {0}, codes
        found = clock.time("bare_get", total, lambda: client.batch_get_into(keys, addresses, sizes))
        assert found == sizes, found
        assert set(client.batch_remove(keys, True)) == {0}


def store_round(store: MooncakeStore, tensors: dict[str, torch.Tensor], clock: Clock, number: int, put: str) -> None:
    attempt = TaskAttempt(task=task_key("bench", 0, number), attempt=1)
    total = sum(tensor.nbytes for tensor in tensors.values())
    specs = clock.time(put, total, lambda: store.put(attempt, tensors))
    ref = SampleRef(attempt=attempt, store=store.name, features=specs)
    found = clock.time(put.replace("put", "get"), total, lambda: store.get(ref))
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    assert store.release(ref) == []


def measure(url: str, object_bytes: int, rounds: int) -> dict[str, Any]:
    store = open_store(url)
    assert isinstance(store, MooncakeStore)
    clock = Clock()
    count = BATCH_BYTES // object_bytes
    try:
        store.remove([f"{store.name}/nothing"])  # memory is lent once a call has connected
        lent = {f"feature{i}": store.empty([object_bytes // 2], torch.bfloat16) for i in range(count)}
        for seed, tensor in enumerate(lent.values()):
            tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed)))
        ordinary = {name: tensor.clone() for name, tensor in lent.items()}
        for number in range(rounds + 1):
            if number == 1:
                clock.rates.clear()  # the first round touches pages
            bare_round(store, lent, clock, str(number))
            store_round(store, lent, clock, 2 * number, "put")
            store_round(store, ordinary, clock, 2 * number + 1, "put_copied")
        del lent
    finally:
        store.close()
    return {
        "object_mib": object_bytes >> 20,
        "objects_per_batch": count,
        **{
            f"{name}_gb_s": round(clock.median(name), 2)
            for name in ("bare_put", "put", "put_copied", "bare_get", "get")
        },
        "put_ratio": round(clock.median("put") / clock.median("bare_put"), 2),
        "put_copied_ratio": round(clock.median("put_copied") / clock.median("bare_put"), 2),
        "get_ratio": round(clock.median("get") / clock.median("bare_get"), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--object-mib", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tcp", action="store_true", help="over TCP instead of the owner's shared memory")
    options = parser.parse_args()
    with mooncake_pool("bench", POOL_BYTES, shared_memory=not options.tcp) as url:
        results = [measure(f"{url}&buffer={BUFFER_BYTES}", mib << 20, options.rounds) for mib in options.object_mib]
    ratio = min(min(result["put_ratio"], result["get_ratio"]) for result in results)
    host = {"machine": platform.machine(), "cores": os.cpu_count()}
    transport = "tcp" if options.tcp else "shared memory"
    print(json.dumps({"ratio": ratio, "goal": 0.8, "transport": transport, **host, "results": results}, indent=2))


if __name__ == "__main__":
    main()
