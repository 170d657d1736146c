"""Samples per second through the whole life of a reference, claim to settled, on SQLite with synchronous=FULL.

Measures ledger operations as the services issue them (batched closures through group commit), and a bare `executemany`
baseline on the same file system in the same run. Floor (docs/design.md): 2000 samples/s on two cores.

    python benchmarks/ledger_throughput.py [--samples 20000] [--url sqlite:////tmp/x.db] [--batch 32]

Prints one JSON object.
"""

import argparse
import asyncio
import json
import os
import resource
import sqlite3
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from fixtures.ledger_world import new_run, sample_ref

from specfleet.coordinator.facts import RunFacts
from specfleet.coordinator.ledger import Ledger, fleet, generations, leases, outbox, samples, tasks, windows
from specfleet.coordinator.ledger.verify import verify
from specfleet.policies.credits import CreditGate, Marks
from specfleet.policies.launches import Placement

MARKS = Marks(1 << 50, 1 << 50, 1 << 40, 1 << 40)
WINDOW = 64
CHECKPOINT_EVERY = 20


async def prepare(ledger: Ledger, count: int) -> RunFacts:
    facts = await new_run(
        ledger,
        "bench",
        count,
        trainer={"world": 1, "batch_size": WINDOW},
        flow={"high_samples": 4096, "low_samples": 2048},
    )
    for start in range(0, count, 4096):
        chunk = [(0, index, 5) for index in range(start, min(start + 4096, count))]
        await ledger.write(lambda conn, c=chunk, s=start: tasks.ingest(conn, facts, c, s))
    await ledger.write(lambda conn: fleet.start_launch(conn, "launch", facts.run, [Placement("a", 0, 1)], "", 1))
    await ledger.write(lambda conn: generations.open_generation(conn, facts, "launch", 1))
    return facts


class Life:
    """Three pipelines that run at once, as in the service: capture, training, deletion."""

    def __init__(self, ledger: Ledger, facts: RunFacts, batch: int) -> None:
        self.ledger, self.facts, self.batch = ledger, facts, batch
        self.captured = self.settled = 0
        self.changed = asyncio.Event()
        self.ack_s: list[float] = []

    async def capture(self) -> None:
        gate = CreditGate()
        while True:
            # Credits, roughly: stay a few windows ahead of training.
            while self.captured - self.settled > (CHECKPOINT_EVERY + 16) * WINDOW:
                self.changed.clear()
                await self.changed.wait()
            sent = await self.ledger.write(
                lambda conn: tasks.dispatch(conn, self.facts, gate, MARKS, 1 << 50, 4 * self.batch, 1)
            )
            if not sent:
                return
            keys = [(d.epoch, d.prompt_index, d.attempt) for d in sent]
            parts = [keys[n : n + self.batch] for n in range(0, len(keys), self.batch)]
            await asyncio.gather(*(self._one_batch(part) for part in parts))
            self.captured += len(keys)

    async def _one_batch(self, keys: list[tuple[int, int, int]]) -> None:
        await self.ledger.write(lambda conn: leases.claim(conn, self.facts, "w1", keys, 1))
        refs = [sample_ref(self.facts, *key) for key in keys]
        await self.ledger.write(lambda conn: samples.accept(conn, self.facts, refs, 1))

    async def train(self, steps: int) -> None:
        step = 0
        while step < steps:
            planned = await self.ledger.write(lambda conn: windows.plan(conn, self.facts, 1))
            await self.ledger.read(lambda conn, p=planned: windows.render(conn, self.facts, 1, p))
            if not planned:
                await asyncio.sleep(0.001)
            for step in planned:
                started = time.perf_counter()
                ack = generations.Ack(1, step, 0, "", 0, 1, 1, 0.1, 0.1, {"loss": 1.0})
                await self.ledger.write(lambda conn, a=ack: generations.ack(conn, self.facts, a, 1))
                self.ack_s.append(time.perf_counter() - started)
                if step % CHECKPOINT_EVERY == 0 or step == steps:
                    await self._checkpoint(step)

    async def _checkpoint(self, step: int) -> None:
        await self.ledger.write(
            lambda conn: generations.commit_checkpoint(conn, self.facts, 1, step, "/c", "d", final=False, now_ms=1)
        )
        self.settled = step * WINDOW
        self.changed.set()

    async def reap(self, training: "asyncio.Task[None]") -> None:
        now = 10
        while True:
            due = await self.ledger.write(lambda conn: outbox.due(conn, now, 1 << 40))
            if not due and training.done():
                return
            ids = [item.release.outbox_id for item in due]
            await self.ledger.write(lambda conn, done=ids: outbox.confirm(conn, done))
            if not ids:
                await asyncio.sleep(0.005)


def baseline(folder: Path, count: int) -> float:
    """Rows per second of one bare conditional UPDATE per row, 64 rows per transaction, one fsync each."""
    connection = sqlite3.connect(folder / "bare.db", isolation_level=None)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute("CREATE TABLE tasks (seq INTEGER PRIMARY KEY, state TEXT NOT NULL, step INTEGER)")
    connection.executemany("INSERT INTO tasks VALUES (?, 'READY', NULL)", ((n,) for n in range(count)))
    started = time.perf_counter()
    for start in range(0, count, WINDOW):
        connection.execute("BEGIN IMMEDIATE")
        rows = [(start // WINDOW, n) for n in range(start, min(start + WINDOW, count))]
        connection.executemany("UPDATE tasks SET state = 'TRAINED', step = ? WHERE seq = ? AND state = 'READY'", rows)
        connection.execute("COMMIT")
    rate = count / (time.perf_counter() - started)
    connection.close()
    return rate


async def measure(url: str, count: int, batch: int) -> dict[str, float | int | str | bool]:
    ledger = Ledger(url)
    await ledger.open()
    facts = await prepare(ledger, count)
    life = Life(ledger, facts, batch)
    started, cpu = time.perf_counter(), time.process_time()
    training = asyncio.create_task(life.train(count // WINDOW))
    await asyncio.gather(life.capture(), training, life.reap(training))
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    verdict = await ledger.read(lambda conn: verify(conn, "bench"))
    await ledger.close()
    acks = sorted(life.ack_s)
    return {
        "backend": url.split(":", 1)[0],
        "samples": count,
        "seconds": round(seconds, 3),
        "samples_per_s": round(count / seconds, 1),
        # What the machine's other work does not change much.
        "cpu_us_per_sample": round(1e6 * cpu / count, 1),
        "load_average": os.getloadavg()[0],
        "ack_p50_ms": round(1000 * acks[len(acks) // 2], 2),
        "ack_p99_ms": round(1000 * acks[int(len(acks) * 0.99)], 2),
        "sound": not verdict.violations and verdict.conserved,
        "max_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--batch", type=int, default=32, help="prompts per claim and references per ingest")
    parser.add_argument("--url", default="", help="ledger; default: SQLite in a temporary folder")
    options = parser.parse_args()
    count = options.samples // WINDOW * WINDOW
    with tempfile.TemporaryDirectory() as folder:
        result = asyncio.run(measure(options.url or f"sqlite:///{folder}/ledger.db", count, options.batch))
        bare = baseline(Path(folder), count)
    result["bare_updates_per_s"] = round(bare, 1)
    result["ratio_to_bare_update"] = round(float(result["samples_per_s"]) / bare, 4)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
