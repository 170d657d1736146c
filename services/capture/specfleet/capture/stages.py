"""From claimed prompts to announced samples: one stage for each kind of engine, the same ends for both."""

import asyncio
import time
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import structlog

from specfleet.capture import metrics
from specfleet.capture.batching import padding_share
from specfleet.capture.concurrency import Concurrency
from specfleet.capture.ends import Ends
from specfleet.capture.engines.base import (
    ForwardEngine,
    ServingEngine,
    Tensors,
    check_stored,
    check_task,
    complete,
)
from specfleet.capture.held import Work
from specfleet.contracts.errors import CaptureItemError
from specfleet.store.base import FeatureStore
from specfleet.wire.capture_pb2 import FAILURE_CLASS_INFRA, FAILURE_CLASS_RETURNED, FAILURE_CLASS_SAMPLE
from specfleet.wire.records_pb2 import CaptureContract, FeatureSpec

log = structlog.get_logger()

Claimed = asyncio.Queue[list[Work] | None]
"""Batches of claimed prompts; None after the last one."""


@dataclass(frozen=True)
class Context:
    """What every stage works with. `stop`: capture nothing new, return what is left."""

    contract: CaptureContract
    contract_hash: str
    store: FeatureStore
    ends: Ends
    stop: asyncio.Event


class Stage(ABC):
    def __init__(self, context: Context) -> None:
        self._contract, self._hash = context.contract, context.contract_hash
        self._store, self._ends, self._stop = context.store, context.ends, context.stop

    @abstractmethod
    async def run(self, claimed: Claimed) -> None:
        """Until None comes. After `stop` nothing new is captured: what is left is returned."""

    async def _next(self, claimed: Claimed) -> list[Work] | None:
        """The next batch without what must not reach the engine: revoked attempts and prompts that cannot be captured."""
        batch = await claimed.get()
        if batch is None:
            return None
        if self._stop.is_set():
            await self._ends.fail(batch, FAILURE_CLASS_RETURNED, "worker drains")
            return []
        fit: list[Work] = []
        for work in batch:
            if work.revoked:
                await self._ends.forget(work)
                continue
            try:
                check_task(work.task, self._contract, self._hash)
            except CaptureItemError as error:
                await self._ends.fail([work], FAILURE_CLASS_SAMPLE, str(error))
            else:
                fit.append(work)
        return fit


@dataclass
class Captured:
    """A batch after its forward pass."""

    works: list[Work]
    results: list[Tensors | CaptureItemError]
    seconds: float


class ForwardStage(Stage):
    """While one batch is put and announced, the next one runs through the target."""

    def __init__(self, engine: ForwardEngine, context: Context) -> None:
        super().__init__(context)
        self._engine = engine
        # One thread: torch parallelises inside a forward pass, and two passes would only share the cores.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")

    async def run(self, claimed: Claimed) -> None:
        captured: asyncio.Queue[Captured | None] = asyncio.Queue(maxsize=1)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._capture(claimed, captured))
                group.create_task(self._announce_all(captured))
        finally:
            self._thread.shutdown(wait=False)

    async def _capture(self, claimed: Claimed, captured: "asyncio.Queue[Captured | None]") -> None:
        while (batch := await self._next(claimed)) is not None:
            if batch and (done := await self._forward(batch)):
                await captured.put(done)
        await captured.put(None)

    async def _forward(self, batch: list[Work]) -> Captured | None:
        started = time.perf_counter()
        try:
            results = await asyncio.get_running_loop().run_in_executor(self._thread, self._run_engine, batch)
        except Exception as error:
            # Whatever the engine raises is the worker's trouble, never the prompts'; the breaker counts it.
            log.exception("engine failed", prompts=len(batch))
            await self._ends.fail(batch, FAILURE_CLASS_INFRA, f"{type(error).__name__}: {error}")
            return None
        seconds = time.perf_counter() - started
        metrics.BATCH_SECONDS.observe(seconds)
        metrics.PADDING.set(padding_share([work.num_tokens for work in batch]))
        return Captured(batch, results, seconds)

    def _run_engine(self, batch: list[Work]) -> list[Tensors | CaptureItemError]:
        results = self._engine.capture([work.task for work in batch])
        checked: list[Tensors | CaptureItemError] = []
        for work, result in zip(batch, results, strict=True):
            if not isinstance(result, CaptureItemError):
                try:
                    result = complete(work.task, self._contract, result)
                except CaptureItemError as error:
                    result = error
            checked.append(result)
        return checked

    async def _announce_all(self, captured: "asyncio.Queue[Captured | None]") -> None:
        while (batch := await captured.get()) is not None:
            tokens = sum(work.num_tokens for work in batch.works)
            async with asyncio.TaskGroup() as group:
                for index, work in enumerate(batch.works):
                    result = batch.results[index]
                    batch.results[index] = {}  # tensors of a stored sample must not live until the batch is done
                    specs = await self._store_one(work, result)
                    if specs is not None:
                        # Announced while the next sample is put: what is announced can be trained and make room.
                        share_s = batch.seconds * work.num_tokens / tokens
                        group.create_task(self._ends.announce(work, specs, share_s))

    async def _store_one(self, work: Work, result: Tensors | CaptureItemError) -> list[FeatureSpec] | None:
        if work.revoked:
            await self._ends.forget(work)
            return None
        if isinstance(result, CaptureItemError):
            await self._ends.fail([work], FAILURE_CLASS_SAMPLE, str(result))
            return None

        async def put() -> list[FeatureSpec]:
            with metrics.PUT_SECONDS.time():
                return await asyncio.to_thread(self._store.put, work.task.attempt, result)

        return await self._ends.stored(work, put)


class ServingStage(Stage):
    """Keeps as many requests under way as make the servers faster. Each prompt goes its own way from there."""

    def __init__(self, engine: ServingEngine, concurrency: Concurrency, context: Context) -> None:
        super().__init__(context)
        self._engine, self._concurrency = engine, concurrency
        self._room = asyncio.Event()
        self._stranded: list[Work] = []
        """Prompts whose request ended with the engine."""

    async def run(self, claimed: Claimed) -> None:
        async with asyncio.TaskGroup() as group:
            while (batch := await self._next(claimed)) is not None:
                for index, work in enumerate(batch):
                    if not await self._admit(work):
                        await self._ends.fail(batch[index:], FAILURE_CLASS_RETURNED, "worker drains")
                        break
                    group.create_task(self._one(work))
        if self._stranded:
            # One report: the breaker counts events, and all of these are one.
            await self._ends.fail(self._stranded, FAILURE_CLASS_INFRA, "the engine was lost with the request under way")

    async def _admit(self, work: Work) -> bool:
        """Waits for room in the window; False when nothing may start any more."""
        while not self._stop.is_set():
            if self._concurrency.admit(work.num_tokens, time.monotonic()):
                return True
            self._room.clear()
            await self._room.wait()
        return False

    async def _one(self, work: Work) -> None:
        started = time.perf_counter()
        try:
            specs = await self._capture(work)
        finally:
            self._concurrency.finish(work.num_tokens)
            metrics.WINDOW_TOKENS.set(self._concurrency.limit_tokens)
            metrics.REQUEST_TOKENS.set(self._concurrency.tokens)
            self._room.set()
        if specs is None:
            return
        seconds = time.perf_counter() - started
        metrics.REQUEST_SECONDS.observe(seconds)
        # Revoked or not: the objects exist, and the coordinator deletes those of an attempt that no longer counts.
        await self._ends.announce(work, specs, seconds)

    async def _capture(self, work: Work) -> list[FeatureSpec] | None:
        """None when the attempt ended some other way."""
        try:
            specs = await self._ends.stored(work, lambda: self._engine.capture(work.task))
            return specs and check_stored(work.task, self._contract, self._store.name, specs)
        except CaptureItemError as error:
            await self._ends.fail([work], FAILURE_CLASS_SAMPLE, str(error))
        except Exception as error:
            # Whatever a server or the way to it does wrong is never the prompt's fault.
            if self._engine.lost.is_set():
                self._stranded.append(work)
            else:
                await self._ends.fail([work], FAILURE_CLASS_INFRA, f"{type(error).__name__}: {error}")
        return None
