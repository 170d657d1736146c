"""Fetch → claim → capture → announce → ack, for one loaded engine, with the stages overlapping.

While one batch is captured and announced (stages.py), the next one is fetched and claimed. The queue between holds one
batch, so a slow store or engine slows the fetch and never piles up claims.
"""

import asyncio
from dataclasses import dataclass

import structlog
from google.protobuf.message import DecodeError

from specfleet.bus.base import Bus, Message, Subscription
from specfleet.capture import metrics
from specfleet.capture.batching import MAX_FETCH, FetchSize, plan_batches
from specfleet.capture.concurrency import Concurrency
from specfleet.capture.control import Control
from specfleet.capture.ends import RETRY_S, Ends, Patience
from specfleet.capture.engines.base import Engine, ForwardEngine, ServingEngine
from specfleet.capture.held import Held, Work
from specfleet.capture.stages import Claimed, Context, ForwardStage, ServingStage, Stage
from specfleet.contracts.errors import SpecfleetError, UnreachableError
from specfleet.contracts.ids import prompts_durable
from specfleet.store.base import FeatureStore
from specfleet.wire.capture_pb2 import FAILURE_CLASS_RETURNED, ClaimTasksResponse
from specfleet.wire.records_pb2 import CaptureContract, PromptTask, TaskAttempt

log = structlog.get_logger()

# Far above the slowest batch, and extended while work is in hand: redelivery is for dead workers only.
ACK_WAIT_S = 60.0
KEEP_ALIVE_S = ACK_WAIT_S / 4
# Bounds how late a fetch notices that the worker should stop.
FETCH_WAIT_S = 0.5
IDLE_S = 0.2


@dataclass
class Limits:
    """What the coordinator's heartbeat answers allow; the worker changes it while the pipeline runs."""

    may_pull: bool = False
    max_batch_tokens: int = 4096


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
        stop: asyncio.Event,
        patience: Patience = Patience(),
    ) -> None:
        """stop: the event that ends `run`."""
        self._hash, self._bus, self._control = contract_hash, bus, control
        self._held, self._limits, self._stop = held, limits, stop
        self._fetch_size = FetchSize()
        self._ends = Ends(
            bus=bus,
            store_name=store.name,
            control=control,
            held=held,
            contract_hash=contract_hash,
            patience=patience,
            stop=stop,
        )
        context = Context(contract, contract_hash, store, self._ends, stop)
        self._stage = _stage(engine, limits, context)

    async def run(self) -> None:
        """Works until `stop` is set, then finishes what the engine works on, returns the rest, and comes back.

        Raises what the bus raises when it is misused; every outage of bus, store or coordinator is waited out.
        """
        subscription = await self._bus.subscribe(
            f"prompts.{self._hash[:32]}.*", prompts_durable(self._hash), ack_wait_s=ACK_WAIT_S
        )
        claimed: Claimed = asyncio.Queue(maxsize=1)
        try:
            async with asyncio.TaskGroup() as group:
                keep_alive = group.create_task(self._keep_alive())
                pull = group.create_task(self._pull(subscription, claimed))
                await self._stage.run(claimed)
                await pull
                keep_alive.cancel()
        finally:
            await subscription.close()

    async def _pull(self, subscription: Subscription, claimed: Claimed) -> None:
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
            await self._ends.fail(works, FAILURE_CLASS_RETURNED, "the claim got no answer")
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
                await self._ends.forget(work)
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

    async def _keep_alive(self) -> None:
        while True:
            await asyncio.sleep(KEEP_ALIVE_S)
            for message in self._held.messages():
                await message.in_progress()

    async def _pause(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self._stop.wait(), seconds)
        except TimeoutError:
            return


def _stage(engine: Engine, limits: Limits, context: Context) -> Stage:
    match engine:
        case ForwardEngine():
            return ForwardStage(engine, context)
        case ServingEngine():
            return ServingStage(engine, Concurrency(limits.max_batch_tokens, engine.most_tokens), context)
        case _:
            raise TypeError(f"{type(engine).__name__} is neither a ForwardEngine nor a ServingEngine")
