"""The clients: processes that keep a number of requests under way, the same code for plain and for captured prefill.

A captured request goes the way of a capture worker's: through SGLangEngine, whose answer means that every feature is
published and checksummed. Its objects are removed at once, in batches, so that the pool never fills. A plain request is the
same one, sent by the same SGLangClient, without the plugin's parameter.
"""

import asyncio
import multiprocessing
import os
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Self

import numpy as np
import uvloop

from specfleet.capture import metrics
from specfleet.capture.engines.sglang import SGLangEngine
from specfleet.capture.engines.table import EngineOptions
from specfleet.contracts.errors import CaptureItemError, EngineError, StoreError
from specfleet.contracts.ids import task_key
from specfleet.sglang.client import SGLangClient
from specfleet.store.base import FeatureStore
from specfleet.store.factory import open_store
from specfleet.telemetry.process import die_with_parent
from specfleet.wire.records_pb2 import CaptureContract, PromptTask, SampleRef, TaskAttempt

RUN = "overhead"
REQUEST_S = 120.0
# Prompt numbers of one client; the next client's begin where they end.
PROMPTS = 10_000_000
PARTS = ("copy", "wait", "hash", "put")


@dataclass(frozen=True)
class Setup:
    """What a client process needs to know, once."""

    index: int
    plain_url: str
    captured_url: str
    store_url: str
    contract: bytes
    seed: int


@dataclass(frozen=True)
class Job:
    captured: bool
    length: int
    in_flight: int
    measure_from: float
    """On the host's monotonic clock, which all processes share; requests begin before."""
    measure_until: float
    keep: int
    """So many measured samples stay in the pool."""
    ordinary: bool = False
    """Requests without capture, to the server that captures."""


@dataclass
class Outcome:
    answered_at: list[float] = field(default_factory=list)
    """When each answer came, drained ones included."""
    cores: float = 0.0
    """What the client itself used while it measured."""
    seconds: dict[str, float] = field(default_factory=dict)
    """What the server says it spent on features, by part."""
    kept: list[bytes] = field(default_factory=list)
    """References of the samples that stayed."""
    failures: list[str] = field(default_factory=list)


def prompt_ids(seed: int, number: int, length: int, vocab_size: int) -> list[int]:
    ids: list[int] = np.random.default_rng([seed, number]).integers(vocab_size, size=length).tolist()
    return ids


class Client:
    """One process, seen from the outside. `run` is called from the event loop that started it."""

    def __init__(self, setup: Setup) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_main, args=(setup, theirs, os.getpid()), daemon=True)
        self._process.start()
        theirs.close()

    async def ready(self) -> None:
        """Returns once the client has probed the capture server. Raises what failed there."""
        await self._answer()

    async def run(self, job: Job) -> Outcome:
        self._connection.send(job)
        outcome = await self._answer()
        assert isinstance(outcome, Outcome)
        return outcome

    async def _answer(self) -> object:
        answer: object = await asyncio.to_thread(self._connection.recv)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        self._process.kill()
        self._process.join()


def _main(setup: Setup, connection: Connection, parent: int) -> None:
    die_with_parent(parent)
    try:
        uvloop.run(_serve(setup, connection))
    except Exception as error:
        cause: BaseException = error
        while isinstance(cause, BaseExceptionGroup):
            cause = cause.exceptions[0]
        # The project's own errors take two arguments, which pickle does not know.
        connection.send(RuntimeError(f"client {setup.index}: {cause}"))


async def _serve(setup: Setup, connection: Connection) -> None:
    async with await Generator.start(setup) as generator:
        connection.send("ready")
        while True:
            job: Job = await asyncio.to_thread(connection.recv)
            connection.send(await generator.run(job))


class Generator:
    """Sends prompts, each with a number of its own, and removes what was captured of them."""

    def __init__(self, setup: Setup, engine: SGLangEngine, store: FeatureStore) -> None:
        self._plain, self._ordinary = SGLangClient(setup.plain_url), SGLangClient(setup.captured_url)
        self._engine, self._store = engine, store
        self._seed = setup.seed
        self._vocab_size = engine.attest().vocab_size
        self._next = setup.index * PROMPTS
        self._captured: asyncio.Queue[list[str]] = asyncio.Queue()
        self._remover = asyncio.create_task(self._remove())

    @classmethod
    async def start(cls, setup: Setup) -> Self:
        store = open_store(setup.store_url)
        options = EngineOptions("sglang", servers=(setup.captured_url,), store_url=setup.store_url)
        engine = await SGLangEngine.load(options, CaptureContract.FromString(setup.contract), store)
        return cls(setup, engine, store)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._remover.cancel()
        await self._plain.close()
        await self._ordinary.close()
        await self._engine.close()
        await asyncio.to_thread(self._store.close)

    async def run(self, job: Job) -> Outcome:
        """Requests until the measurement's end; returns when all are answered and removed."""
        outcome, spent = Outcome(), _seconds()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch(job, outcome))
            for _ in range(job.in_flight):
                group.create_task(self._send(job, outcome))
        outcome.seconds = {part: seconds - spent[part] for part, seconds in _seconds().items()}
        await self._captured.join()
        return outcome

    async def _send(self, job: Job, outcome: Outcome) -> None:
        while time.monotonic() < job.measure_until:
            number, self._next = self._next, self._next + 1
            ids = prompt_ids(self._seed, number, job.length, self._vocab_size)
            try:
                await (self._capture(number, ids, job, outcome) if job.captured else self._generate(ids, job))
            except (CaptureItemError, StoreError, EngineError) as error:
                outcome.failures.append(str(error))
                if self._engine.lost.is_set():
                    raise
            else:
                outcome.answered_at.append(time.monotonic())

    async def _generate(self, ids: list[int], job: Job) -> None:
        sampling = {"max_new_tokens": 1, "temperature": 0}
        client = self._ordinary if job.ordinary else self._plain
        await client.generate({"input_ids": ids, "sampling_params": sampling}, REQUEST_S)

    async def _capture(self, number: int, ids: list[int], job: Job, outcome: Outcome) -> None:
        attempt = TaskAttempt(task=task_key(RUN, 0, number), attempt=1)
        task = PromptTask(attempt=attempt, input_ids=ids, loss_mask=b"\1" * len(ids), store=self._store.name)
        features = await self._engine.capture(task)
        if len(outcome.kept) < job.keep and time.monotonic() >= job.measure_from:
            ref = SampleRef(attempt=attempt, store=self._store.name, num_tokens=len(ids), features=features)
            outcome.kept.append(ref.SerializeToString())
        else:
            self._captured.put_nowait([feature.key for feature in features])

    async def _remove(self) -> None:
        while True:
            batches = [await self._captured.get()]
            while not self._captured.empty():
                batches.append(self._captured.get_nowait())
            await asyncio.to_thread(self._store.remove, [key for keys in batches for key in keys])
            for _ in batches:
                self._captured.task_done()

    async def _watch(self, job: Job, outcome: Outcome) -> None:
        await asyncio.sleep(job.measure_from - time.monotonic())
        used = time.process_time()
        await asyncio.sleep(job.measure_until - time.monotonic())
        outcome.cores = (time.process_time() - used) / (job.measure_until - job.measure_from)


def _seconds() -> dict[str, float]:
    found = {
        sample.labels["part"]: sample.value
        for metric in metrics.SINK_SECONDS.collect()
        for sample in metric.samples
        if sample.name.endswith("_total")
    }
    return {part: found.get(part, 0.0) for part in PARTS}
