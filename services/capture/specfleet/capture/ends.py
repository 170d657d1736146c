"""How an attempt ends: announced, given back, or forgotten. Whatever becomes of a prompt passes through here."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import structlog

from specfleet.bus.base import Bus
from specfleet.capture import metrics
from specfleet.capture.control import Control
from specfleet.capture.held import Held, Work
from specfleet.contracts.errors import SpecfleetError, StoreError, StoreFullError, UnreachableError
from specfleet.contracts.ids import samples_subject
from specfleet.wire.capture_pb2 import FAILURE_CLASS_INFRA, FAILURE_CLASS_RETURNED, FailureClass, TaskFailure
from specfleet.wire.records_pb2 import FeatureSpec, SampleRef

log = structlog.get_logger()

# Repeats of one call to the coordinator before looking whether the worker should stop.
RETRY_S = 3.0
# Between the first and the second try of a put; doubles up to 2 s.
FIRST_DELAY_S = 0.05


@dataclass(frozen=True)
class Patience:
    """How long a put is retried, seconds. A full pool is back-pressure and may last as long as a trainer restart."""

    store_full_s: float = 300.0
    store_error_s: float = 3.0
    draining_s: float = 5.0
    """For a whole drain, not for each put."""


class Ends:
    """For one pipeline; `stop` is the event that ends it."""

    def __init__(
        self,
        *,
        bus: Bus,
        store_name: str,
        control: Control,
        held: Held,
        contract_hash: str,
        patience: Patience,
        stop: asyncio.Event,
    ) -> None:
        self._bus, self._store_name, self._control, self._held = bus, store_name, control, held
        self._hash, self._patience, self._stop = contract_hash, patience, stop
        self._drain_by: float | None = None

    async def announce(self, work: Work, specs: Sequence[FeatureSpec], capture_s: float) -> None:
        """Publishes the reference, then acks the prompt. Waits for an absent bus."""
        task = work.task
        ref = SampleRef(
            attempt=task.attempt,
            contract_hash=self._hash,
            store=self._store_name,
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
        await self.forget(work)

    async def fail(self, works: Sequence[Work], failure_class: FailureClass, reason: str) -> None:
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
            await self.forget(work)

    async def forget(self, work: Work) -> None:
        await work.message.ack()
        self._held.end(work)
        metrics.IN_HAND.set(len(self._held))

    async def stored(self, work: Work, store: Callable[[], Awaitable[list[FeatureSpec]]]) -> list[FeatureSpec] | None:
        """What `store` returns, tried again with back-off: long while the pool is full, briefly on other StoreErrors.

        None when it stays refused: the attempt is given back then.
        """
        started, delay = time.monotonic(), FIRST_DELAY_S
        while True:
            try:
                return await store()
            except StoreError as error:
                full = isinstance(error, StoreFullError)
                patience_s = self._patience.store_full_s if full else self._patience.store_error_s
                left_s = min(started + patience_s - time.monotonic(), self._drain_left_s())
                if work.revoked or left_s < delay:
                    drains = full and self._stop.is_set()
                    await self.fail([work], FAILURE_CLASS_RETURNED if drains else FAILURE_CLASS_INFRA, str(error))
                    return None
                if full:
                    metrics.STORE_FULL.inc()
                if delay == FIRST_DELAY_S:
                    log.warning("put failed; trying again", sample=work.id, error=str(error))
            await asyncio.sleep(delay)
            delay = min(delay * 2, 2.0)

    def _drain_left_s(self) -> float:
        """Seconds that may still be spent on waiting for others; infinite until `stop`."""
        if not self._stop.is_set():
            return math.inf
        if self._drain_by is None:
            self._drain_by = time.monotonic() + self._patience.draining_s
        return max(0.0, self._drain_by - time.monotonic())
