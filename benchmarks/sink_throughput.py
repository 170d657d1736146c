"""What the capture plugin's sink passes from the device to the store, without a server.

    python -m benchmarks.sink_throughput [--tokens 512 2048] [--hidden 1024] [--seconds 4] [--device cuda]

Starts a Mooncake master and a pre-faulted owner on loopback and plays SGLang's scheduler: prompts are admitted within
pending_bytes and run in batches of up to 8192 tokens, whose states (three layers and the final one, bf16) lie on the device.
Prints one JSON object. For each length, with the store in a process of its own (`process`, as on CUDA), in the scheduler's (`thread`)
and there with one put a sample (`one_by_one`):

gb_s, samples_s   what was published, as fast as it goes
scheduler_ms      processor time a sample costs in the scheduler's thread: parsing, memory, starting copies, answers
writer_ms         the same in the sink's thread. Both need Python's global lock; hashing and copies of memory, which do not,
                  are taken off
put_calls         samples for each put
slowed            how much longer a scheduler's own work takes beside the sink: small operations one after the other, as one
                  that launches kernels, for as long as a GPU takes for a batch (on few cores the store's copies count too)
"""

import argparse
import base64
import json
import multiprocessing
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, TypeVar
from unittest import mock

import torch

from benchmarks.host import host
from benchmarks.mooncake_pool import mooncake_pool
from specfleet.capture.sglang_plugin.admission import Admission
from specfleet.capture.sglang_plugin.copies import HostCopier, copier_for
from specfleet.capture.sglang_plugin.request import CaptureRequest, Origin, parse
from specfleet.capture.sglang_plugin.sink import FINITE, Capture, Sink, Span
from specfleet.contracts.capture import feature_table
from specfleet.store import writing
from specfleet.store.apart import StoreApart
from specfleet.store.base import FeatureStore, Sample
from specfleet.store.factory import open_store
from specfleet.wire.records_pb2 import CaptureContract

T = TypeVar("T")

BATCH_TOKENS = 8192
LAYERS = (2, 14, 25)
# A batch at the 212k tokens/s of plain prefill on an H200 (28 layers, hidden 1024).
BATCH_S = 0.038


class Apart:
    """Processor time of this thread in calls that do not need the lock."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, call: Callable[..., T]) -> Callable[..., T]:
        def timed(*arguments: Any, **options: Any) -> T:
            before = time.thread_time()
            try:
                return call(*arguments, **options)
            finally:
                self.seconds += time.thread_time() - before

        return timed


class Counting:
    """Counts puts, and hands over one sample at a time if asked."""

    def __init__(self, store: FeatureStore, one_by_one: bool) -> None:
        self.calls, self.samples = 0, 0
        self._put_many, self._one_by_one = store.put_many, one_by_one

    def put_many(self, samples: Sequence[Sample]) -> list[Any]:
        groups = [[sample] for sample in samples] if self._one_by_one else [samples]
        self.calls += len(groups)
        self.samples += len(samples)
        return [outcome for group in groups for outcome in self._put_many(group)]


@dataclass
class Work:
    """What a scheduler does besides capturing: `amount` small operations for each batch."""

    amount: int
    seconds: list[float] = field(default_factory=list)

    def run(self) -> None:
        small = torch.zeros(16)
        started = time.perf_counter()
        for _ in range(self.amount):
            small.add_(1.0)
        self.seconds.append(time.perf_counter() - started)

    @classmethod
    def lasting(cls, seconds: float) -> "Work":
        probe = cls(20_000)
        for _ in range(3):
            probe.run()
        return cls(int(probe.amount * seconds / min(probe.seconds)))


class Scheduler:
    """SGLang's, as far as the sink sees it."""

    def __init__(
        self,
        sink: Sink,
        table: dict[str, tuple[str, int]],
        tokens: int,
        device: torch.device,
        pending_bytes: int,
        removals: Connection,
    ) -> None:
        self.spent_s = 0.0
        self.answers: list[dict[str, Any]] = []
        self._sink, self._table, self._tokens, self._removals = sink, table, tokens, removals
        self._admission: Admission[tuple[str, CaptureRequest]] = Admission(pending_bytes)
        self._under_way: dict[str, Capture] = {}
        self._ready: deque[tuple[str, CaptureRequest]] = deque()
        self._ids = array("q", range(tokens))
        self._mask = base64.b64encode(bytes(tokens)).decode()
        self._number = 0
        rows = max(BATCH_TOKENS, tokens)
        width = table["final_state"][1]
        self._states = {
            "aux_states": torch.randn(rows, 3 * width).to(device, torch.bfloat16),
            "final_state": torch.randn(rows, width).to(device, torch.bfloat16),
            FINITE: torch.ones(rows, dtype=torch.bool, device=device),
        }

    def run(self, seconds: float, work: Work | None) -> float:
        """Returns the seconds until the last was answered."""
        started = time.perf_counter()
        while time.perf_counter() - started < seconds:
            self._step()
            if work is not None:
                work.run()
        while self._under_way:
            self._collect()
            time.sleep(0.0005)
        return time.perf_counter() - started

    def _step(self) -> None:
        self._collect()
        before = time.thread_time()
        while self._admission.waiting * self._tokens < BATCH_TOKENS:
            self._offer()
        self._ready.extend(self._admission.admit())
        spans = []
        while self._ready and (len(spans) + 1) * self._tokens <= max(BATCH_TOKENS, self._tokens):
            name, request = self._ready.popleft()
            capture = self._under_way[name] = self._sink.begin(name, request, self._ids)
            spans.append(Span(capture, len(spans) * self._tokens, 0, self._tokens))
        if spans:
            self._sink.take(spans, self._states)
        self.spent_s += time.thread_time() - before
        if not spans:
            time.sleep(0.0005)

    def _offer(self) -> None:
        self._number += 1
        name = f"r{self._number}"
        wish = {"sample": f"bench/e0000-p{self._number:09d}/a1", "store": "bench", "loss_mask": self._mask}
        request = parse(wish, self._ids, 32_000, "bench", self._table)
        self._admission.offer(name, request.num_bytes, (name, request))

    def _collect(self) -> None:
        before = time.thread_time()
        answers = []
        for name in self._sink.published():
            self._admission.end(name)
            answers.append(self._under_way.pop(name).answer)
        self.spent_s += time.thread_time() - before
        if answers:
            assert all(answer and answer["ok"] for answer in answers), answers
            self.answers += answers
            self._removals.send([feature["key"] for answer in answers for feature in answer["features"].values()])


def remove_all(url: str, keys: Connection) -> None:
    """A process of its own: what was published makes room."""
    store = open_store(url)
    keys.send(True)
    while batch := keys.recv():
        assert store.remove(batch) == []
    store.close()


def measure(url: str, tokens: int, options: argparse.Namespace, kind: str, work: Work | None) -> dict[str, Any]:
    device, pending_bytes = torch.device(options.device), options.pending_mib << 20
    contract = CaptureContract(layers=LAYERS, final_state="post_norm", dtype="bfloat16", hidden_size=options.hidden)
    table = feature_table(contract)
    store = StoreApart(url) if kind == "process" else open_store(url)
    counting = Counting(store, kind == "one_by_one")
    store.put_many = counting.put_many  # type: ignore[method-assign]
    hashing, copying = Apart(), Apart()
    copier = copier_for(device)
    if isinstance(copier, HostCopier):
        copier.start = copying.timed(copier.start)  # type: ignore[method-assign]
    sink = Sink(store, table, Origin("bench", LAYERS, "none", "none"), copier, store_full_s=60.0)
    sink.reserve(pending_bytes)
    ours, theirs = multiprocessing.Pipe()
    remover = multiprocessing.get_context("spawn").Process(target=remove_all, args=(url, theirs))
    remover.start()
    theirs.close()
    assert ours.recv()
    writer = sink._writer.ident
    assert writer is not None
    clock = time.pthread_getcpuclockid(writer)
    try:
        scheduler = Scheduler(sink, table, tokens, device, pending_bytes, ours)
        scheduler.run(options.seconds / 4, None)
        scheduler.spent_s, scheduler.answers, counting.calls, counting.samples = 0.0, [], 0, 0
        copying.seconds = 0.0
        before = time.clock_gettime(clock)
        with mock.patch.object(writing, "checksum", hashing.timed(writing.checksum)):
            wall_s = scheduler.run(options.seconds, work)
        writer_s = time.clock_gettime(clock) - before
    finally:
        sink.close()
        ours.send(None)
        remover.join()
    answers = scheduler.answers
    parts = {part: sum(answer["seconds"][part] for answer in answers) for part in ("copy", "wait", "hash", "put")}
    num_bytes = sum(feature["bytes"] for answer in answers for feature in answer["features"].values())
    return {
        "gb_s": round(num_bytes / wall_s / 1e9, 2),
        "samples_s": round(len(answers) / wall_s),
        "scheduler_ms": round((scheduler.spent_s - copying.seconds) / len(answers) * 1e3, 3),
        "writer_ms": round((writer_s - hashing.seconds) / len(answers) * 1e3, 3),
        "put_calls": round(counting.samples / counting.calls, 1),
        "seconds_per_sample_ms": {part: round(value / len(answers) * 1e3, 2) for part, value in parts.items()},
    }


def compare(url: str, tokens: int, options: argparse.Namespace, work: Work) -> dict[str, Any]:
    result: dict[str, Any] = {"tokens": tokens}
    for name in ("process", "thread", "one_by_one"):
        result[name] = measure(url, tokens, options, name, None)
        work.seconds.clear()
        measure(url, tokens, options, name, work)
        result[name]["slowed"] = round(sum(work.seconds) / len(work.seconds) / BATCH_S, 3)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--pool-gib", type=int, default=1)
    parser.add_argument("--pending-mib", type=int, default=512, help="the plugin's pending_bytes")
    options = parser.parse_args()
    work = Work.lasting(BATCH_S)
    with mooncake_pool("bench", options.pool_gib << 30) as url:
        results = [compare(url, tokens, options, work) for tokens in options.tokens]
    about = host("benchmarks.sink_throughput", torch.device(options.device), ("mooncake-transfer-engine-non-cuda",))
    print(json.dumps({**about, "hidden": options.hidden, "results": results}, indent=2))


if __name__ == "__main__":
    main()
