"""Fetch → claim → capture → put → announce → ack, for one loaded engine, with the stages overlapping.

While batch n is being put and announced, batch n+1 runs through the target and batch n+2 is fetched and claimed. The
queues between the stages hold one batch each, so a slow store slows the fetch and never piles up claims.
"""

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import structlog
from google.protobuf.message import DecodeError

from specfleet.bus.base import Bus, Message, Subscription
from specfleet.capture import metrics
from specfleet.capture.batching import MAX_FETCH, FetchSize, padding_share, plan_batches
from specfleet.capture.control import Control
from specfleet.capture.engines.base import Engine, Tensors, check_task, complete
from specfleet.capture.held import Held, Work
from specfleet.contracts.errors import CaptureItemError, SpecfleetError, StoreError, StoreFullError, UnreachableError
from specfleet.contracts.ids import prompts_durable, samples_subject
from specfleet.store.base import FeatureStore
from specfleet.wire.capture_pb2 import (
    FAILURE_CLASS_INFRA,
    FAILURE_CLASS_RETURNED,
    FAILURE_CLASS_SAMPLE,
    ClaimTasksResponse,
    FailureClass,
    TaskFailure,
)
from specfleet.wire.records_pb2 import CaptureContract, FeatureSpec, PromptTask, SampleRef, TaskAttempt

log = structlog.get_logger()
T = TypeVar("T")

# Far above the slowest batch, and extended while work is in hand: redelivery is for dead workers only.
ACK_WAIT_S = 60.0
KEEP_ALIVE_S = ACK_WAIT_S / 4
# Bounds how late a fetch notices that the worker should stop.
FETCH_WAIT_S = 0.5
# Repeats of one call to the coordinator before looking whether the worker should stop.
RETRY_S = 3.0
# Between the first and the second try of a put; doubles up to 2 s.
FIRST_DELAY_S = 0.05
IDLE_S = 0.2


@dataclass
class Limits:
    """What the coordinator's heartbeat answers allow; the worker changes it while the pipeline runs."""

    may_pull: bool = False
    max_batch_tokens: int = 4096


@dataclass(frozen=True)
class Patience:
    """How long a put is retried, seconds. A full pool is back-pressure and may last as long as a trainer restart."""

    store_full_s: float = 300.0
    store_error_s: float = 3.0
    draining_s: float = 5.0
    """For a whole drain, not for each put."""


@dataclass
class Captured:
    """A batch after its forward pass."""

    works: list[Work]
    results: list[Tensors | CaptureItemError]
    seconds: float


class Pipeline:
    def __init__(
        self,
        *,
        engine: Engine,
        contract: CaptureContract,
        contract_hash: str,
        bus: Bus,
        store: FeatureStore,
        control: Control,
        held: Held,
        limits: Limits,
        patience: Patience = Patience(),
    ) -> None:
        self._engine, self._contract, self._hash = engine, contract, contract_hash
        self._bus, self._store, self._control = bus, store, control
        self._held, self._limits, self._patience = held, limits, patience
        self._fetch_size = FetchSize()
        self._stop = asyncio.Event()
        self._drain_by: float | None = None
        # One thread: torch parallelises inside a forward pass, and two passes would only share the cores.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")

    async def run(self, stop: asyncio.Event) -> None:
        """Works until `stop` is set, then finishes the batch in the engine, returns the rest, and comes back.

        Raises what the bus raises when it is misused; every outage of bus, store or coordinator is waited out.
        """
        self._stop = stop
        subscription = await self._bus.subscribe(
            f"prompts.{self._hash[:32]}.*", prompts_durable(self._hash), ack_wait_s=ACK_WAIT_S
        )
        claimed: asyncio.Queue[list[Work] | None] = asyncio.Queue(maxsize=1)
        captured: asyncio.Queue[Captured | None] = asyncio.Queue(maxsize=1)
        try:
            async with asyncio.TaskGroup() as group:
                keep_alive = group.create_task(self._keep_alive())
                pull = group.create_task(self._pull(subscription, claimed))
                capture = group.create_task(self._capture(claimed, captured))
                await self._announce_all(captured)
                await asyncio.gather(pull, capture)
                keep_alive.cancel()
        finally:
            self._thread.shutdown(wait=False)
            await subscription.close()

    # -- fetch and claim ------------------------------------------------------------------------------------------

    async def _pull(self, subscription: Subscription, claimed: "asyncio.Queue[list[Work] | None]") -> None:
        while not self._stop.is_set():
            if not self._limits.may_pull:
                await self._pause(IDLE_S)
                continue
            size = min(MAX_FETCH, self._fetch_size.size(self._limits.max_batch_tokens))
            messages = await subscription.fetch(size, FETCH_WAIT_S)
            works = [work for message in messages if (work := await self._take(message))]
            lengths = [work.num_tokens for work in works]
            self._fetch_size.saw(lengths)
            works = await self._claim(works)
            for batch in plan_batches([work.num_tokens for work in works], self._limits.max_batch_tokens):
                await claimed.put([works[index] for index in batch])
        await claimed.put(None)

    async def _take(self, message: Message) -> Work | None:
        """None for a message that needs no work of its own."""
        try:
            work = Work(PromptTask.FromString(message.data), message)
        except DecodeError as error:
            log.error("dropped a message that is not a PromptTask", subject=message.subject, error=str(error))
            await message.ack()
            return None
        added = self._held.add(work)
        metrics.IN_HAND.set(len(self._held))
        return work if added else None

    async def _claim(self, works: list[Work]) -> list[Work]:
        """One call for the whole fetch. Refused ones are acked and forgotten: nobody needs them here."""
        if not works:
            return []
        response = await self._ask_for([work.task.attempt for work in works])
        if response is None:
            # The call may have reached the coordinator; returning an attempt that is not ours is harmless.
            await self._fail(works, FAILURE_CLASS_RETURNED, "the claim got no answer")
            return []
        accepted: list[Work] = []
        # Results are in the request's order; matching by id as well would only hide a broken coordinator.
        for work, result in zip(works, response.results, strict=True):
            work.claimed = result.accepted
            if result.accepted:
                accepted.append(work)
            else:
                metrics.REFUSED_CLAIMS.inc()
                log.info("claim refused", sample=work.id, reason=result.reason)
                await self._forget(work)
        return accepted

    async def _ask_for(self, attempts: list[TaskAttempt]) -> ClaimTasksResponse | None:
        """Waits for an absent coordinator until `stop`. None when there is no answer, or the answer is an error."""
        while True:
            try:
                return await self._control.claim(attempts, RETRY_S)
            except UnreachableError as error:
                if self._stop.is_set():
                    return None
                log.warning("coordinator away; holding unclaimed prompts", prompts=len(attempts), error=str(error))
            except SpecfleetError as error:
                # As after a restart that forgot this worker: the next heartbeat sorts it out and allows pulling again.
                log.warning("claim failed", error=str(error))
                self._limits.may_pull = False
                return None

    # -- capture --------------------------------------------------------------------------------------------------

    async def _capture(
        self, claimed: "asyncio.Queue[list[Work] | None]", captured: "asyncio.Queue[Captured | None]"
    ) -> None:
        while (batch := await claimed.get()) is not None:
            if self._stop.is_set():
                await self._fail(batch, FAILURE_CLASS_RETURNED, "worker drains")
                continue
            batch = await self._fit(batch)
            if batch and (done := await self._forward(batch)):
                await captured.put(done)
        await captured.put(None)

    async def _fit(self, batch: list[Work]) -> list[Work]:
        """Drops what must not reach the engine: revoked attempts and prompts that cannot be captured."""
        fit: list[Work] = []
        for work in batch:
            if work.revoked:
                await self._forget(work)
                continue
            try:
                check_task(work.task, self._contract, self._hash)
            except CaptureItemError as error:
                await self._fail([work], FAILURE_CLASS_SAMPLE, str(error))
            else:
                fit.append(work)
        return fit

    async def _forward(self, batch: list[Work]) -> Captured | None:
        started = time.perf_counter()
        try:
            results = await self._in_engine(lambda: self._run_engine(batch))
        except Exception as error:
            # Whatever the engine raises is the worker's trouble, never the prompts'; the breaker counts it.
            log.exception("engine failed", prompts=len(batch))
            await self._fail(batch, FAILURE_CLASS_INFRA, f"{type(error).__name__}: {error}")
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

    # -- put and announce -----------------------------------------------------------------------------------------

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
                        group.create_task(self._announce(work, specs, share_s))

    async def _store_one(self, work: Work, result: Tensors | CaptureItemError) -> list[FeatureSpec] | None:
        if work.revoked:
            await self._forget(work)
            return None
        if isinstance(result, CaptureItemError):
            await self._fail([work], FAILURE_CLASS_SAMPLE, str(result))
            return None
        try:
            return await self._put(work, result)
        except StoreError as error:
            drains = self._stop.is_set() and isinstance(error, StoreFullError)
            await self._fail([work], FAILURE_CLASS_RETURNED if drains else FAILURE_CLASS_INFRA, str(error))
            return None

    async def _put(self, work: Work, tensors: Tensors) -> list[FeatureSpec]:
        """Retries with back-off: long while the pool is full, briefly on other errors. Raises the last StoreError."""
        started, delay = time.monotonic(), FIRST_DELAY_S
        while True:
            try:
                with metrics.PUT_SECONDS.time():
                    return await asyncio.to_thread(self._store.put, work.task.attempt, tensors)
            except StoreError as error:
                full = isinstance(error, StoreFullError)
                patience_s = self._patience.store_full_s if full else self._patience.store_error_s
                left_s = min(started + patience_s - time.monotonic(), self._drain_left_s())
                if work.revoked or left_s < delay:
                    raise
                if full:
                    metrics.STORE_FULL.inc()
                if delay == FIRST_DELAY_S:
                    log.warning("put failed; trying again", sample=work.id, error=str(error))
            await asyncio.sleep(delay)
            delay = min(delay * 2, 2.0)

    async def _announce(self, work: Work, specs: list[FeatureSpec], capture_s: float) -> None:
        task = work.task
        ref = SampleRef(
            attempt=task.attempt,
            contract_hash=self._hash,
            store=self._store.name,
            num_tokens=work.num_tokens,
            num_loss_tokens=task.loss_mask.count(1),
            num_bytes=sum(spec.num_bytes for spec in specs),
            features=specs,
            worker_id=self._control.worker_id,
            captured_at_unix_ms=time.time_ns() // 1_000_000,
            capture_s=capture_s,
        )
        subject = samples_subject(task.attempt.task.run_id)
        await self._bus.publish(subject, ref.SerializeToString(), message_id=work.id)
        metrics.CAPTURED_TOKENS.inc(work.num_tokens)
        metrics.CAPTURED_SAMPLES.inc()
        await self._forget(work)

    # -- ends -----------------------------------------------------------------------------------------------------

    async def _fail(self, works: Sequence[Work], failure_class: FailureClass, reason: str) -> None:
        """Tells the coordinator, then acks: it dispatches a new attempt, so this message has no further use.

        An absent coordinator is waited for, but not while draining: the leases then run out by themselves.
        """
        name = FailureClass.Name(failure_class).removeprefix("FAILURE_CLASS_")
        log.warning("attempts given back", failure_class=name, samples=[work.id for work in works], reason=reason)
        metrics.FAILED_SAMPLES.labels(name).inc(len(works))
        failures = [
            TaskFailure(attempt=work.task.attempt, failure_class=failure_class, reason=reason) for work in works
        ]
        while True:
            try:
                await self._control.fail(failures, min(RETRY_S, self._drain_left_s()))
            except UnreachableError as error:
                log.warning("coordinator away; failures not reported yet", samples=len(works), error=str(error))
                if not self._stop.is_set():
                    continue
            except SpecfleetError as error:
                log.warning("coordinator refused failures; the leases will run out", error=str(error))
            break
        for work in works:
            await self._forget(work)

    async def _forget(self, work: Work) -> None:
        await work.message.ack()
        self._held.end(work)
        metrics.IN_HAND.set(len(self._held))

    # -- plumbing -------------------------------------------------------------------------------------------------

    async def _keep_alive(self) -> None:
        while True:
            await asyncio.sleep(KEEP_ALIVE_S)
            for message in self._held.messages():
                await message.in_progress()

    def _drain_left_s(self) -> float:
        """Seconds that may still be spent on waiting for others; infinite until `stop`."""
        if not self._stop.is_set():
            return math.inf
        if self._drain_by is None:
            self._drain_by = time.monotonic() + self._patience.draining_s
        return max(0.0, self._drain_by - time.monotonic())

    async def _pause(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self._stop.wait(), seconds)
        except TimeoutError:
            return

    async def _in_engine(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)
