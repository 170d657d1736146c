"""A rank's line to the coordinator and the bus: an asyncio loop in a thread of its own.

The training thread never waits for the network, except where it must: to join, and before and while a checkpoint is
committed. Acks of finished steps are sent in the background, in order, for ever, until the coordinator answers.
"""

import asyncio
import concurrent.futures
import math
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import structlog

from specfleet.bus.factory import open_bus
from specfleet.contracts.errors import SpecfleetError, UnreachableError
from specfleet.rpc.client import call, connect
from specfleet.rpc.errors import INTERNAL_CODE
from specfleet.wire.records_pb2 import StepPlan, TaskKey
from specfleet.wire.run_pb2 import ExplainSampleRequest, ExplainSampleResponse
from specfleet.wire.run_pb2_grpc import RunServiceStub
from specfleet.wire.trainer_pb2 import (
    AckStepRequest,
    CommitCheckpointRequest,
    DetachRunRequest,
    JoinRunRequest,
    JoinRunResponse,
    ReportLostRequest,
)
from specfleet.wire.trainer_pb2_grpc import TrainerControlStub

log = structlog.get_logger()

_CALL_TIMEOUT_S = 30.0
# Joining blocks until the last rank has joined; a lost connection or a restarted coordinator is noticed this often.
_JOIN_TIMEOUT_S = 60.0
# A last word that nobody hears must not hold up a rank that leaves.
_DETACH_RETRY_S = 10.0
_INTERNAL_TRIES = 60
_INTERNAL_PAUSE_S = 1.0
_POLL_S = 0.1
_CLOSE_S = 5.0
# Steps whose acks may be outstanding. Enough for a coordinator restart of minutes at small steps; bounded all the same.
_MAX_PENDING_ACKS = 256

T = TypeVar("T")


class LinkAbandoned(Exception):
    """The rank was told to leave while it waited for the coordinator."""


class Link:
    """Thread-safe. `fenced` turns true when the coordinator no longer accepts this generation: leave, touch nothing."""

    def __init__(self, coordinator: str, nats: str) -> None:
        self._coordinator = coordinator
        self._nats = nats
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="link", daemon=True)
        self._tasks: set[asyncio.Task[None]] = set()
        self._condition = threading.Condition()
        self._sent = 0
        self._acked = 0
        self._failure: BaseException | None = None
        self.fenced = False

    def start(self, give_up: Callable[[], bool]) -> None:
        """Connects to the bus, for as long as it takes. Raises LinkAbandoned when give_up turns true first."""
        self._thread.start()
        self._wait(self._prepare(), lambda: False)
        self._wait(self._open(), give_up)

    def check(self) -> None:
        """Raises what a background task failed with."""
        if self._failure is not None:
            raise self._failure

    def join(self, request: JoinRunRequest, give_up: Callable[[], bool]) -> JoinRunResponse:
        """Retries for ever while the coordinator is away. Raises LinkAbandoned when give_up turns true first."""

        async def attempt() -> JoinRunResponse:
            while True:
                try:
                    return await call(self._stub.JoinRun, request, timeout_s=_JOIN_TIMEOUT_S, retry_s=math.inf)
                except UnreachableError as error:
                    log.info("still joining", reason=error.message)

        return self._wait(attempt(), give_up)

    def follow(self, subject: str, deliver: Callable[[StepPlan], None]) -> None:
        """Hands every plan of the subject to `deliver` (on the link's thread), from the first one on."""

        async def pump() -> None:
            async for data in self._bus.follow(subject, from_start=True):
                deliver(StepPlan.FromString(data))

        self._start(pump())

    def ack(self, request: AckStepRequest) -> None:
        """Queues an ack and returns; waits only when too many are outstanding."""
        with self._condition:
            while self._sent - self._acked >= _MAX_PENDING_ACKS and not (self.fenced or self._failure):
                self._condition.wait(_POLL_S)
            self._sent += 1
        self._loop.call_soon_threadsafe(self._acks.put_nowait, request)

    def flush(self, give_up: Callable[[], bool]) -> bool:
        """Waits until every queued ack was accepted. False when fenced, or when give_up turns true first."""
        with self._condition:
            while self._acked < self._sent:
                if self.fenced or self._failure or give_up():
                    break
                self._condition.wait(_POLL_S)
            accepted = self._acked >= self._sent and not self.fenced
        self.check()
        return accepted

    def report_lost(self, request: ReportLostRequest) -> None:
        """Sends the report in the background, until the coordinator has it."""

        async def report() -> None:
            response = await self._persist(self._stub.ReportLost, request)
            if not response.accepted:
                self._fence("report of lost objects", request.generation)

        self._start(report())

    def commit(self, request: CommitCheckpointRequest, give_up: Callable[[], bool]) -> bool:
        """True when the checkpoint is in the ledger. Raises LinkAbandoned when give_up turns true first."""
        response = self._wait(self._persist(self._stub.CommitCheckpoint, request), give_up)
        if not response.accepted:
            self._fence("checkpoint", request.generation)
        return bool(response.accepted)

    def explain(self, task: TaskKey, give_up: Callable[[], bool]) -> ExplainSampleResponse:
        """What the ledger knows of a task. Raises LinkAbandoned when give_up turns true first."""
        return self._wait(self._persist(self._runs.ExplainSample, ExplainSampleRequest(task=task)), give_up)

    def detach(self, request: DetachRunRequest, give_up: Callable[[], bool]) -> None:
        """Says goodbye; that nobody hears it is logged, not raised."""
        try:
            self._wait(call(self._stub.DetachRun, request, timeout_s=5.0, retry_s=_DETACH_RETRY_S), give_up)
        except (SpecfleetError, LinkAbandoned) as error:
            log.warning("could not detach", reason=str(error))

    def close(self) -> None:
        if self._thread.is_alive():
            shutting = asyncio.run_coroutine_threadsafe(self._shut(), self._loop)
            try:
                shutting.result(timeout=_CLOSE_S)
            except TimeoutError:
                log.warning("connections did not close in time", timeout_s=_CLOSE_S)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout=_CLOSE_S)
        if not self._loop.is_running():
            self._loop.close()

    # On the link's thread from here on.

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    async def _prepare(self) -> None:
        # Made on this loop, which is where they are used.
        self._channel = connect(self._coordinator)
        self._stub = TrainerControlStub(self._channel)
        self._runs = RunServiceStub(self._channel)
        self._bus = open_bus(self._nats)
        self._acks: asyncio.Queue[AckStepRequest] = asyncio.Queue()

    async def _open(self) -> None:
        await self._bus.connect()
        self._keep(self._send_acks())

    async def _shut(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._channel.close(grace=None)
        await self._bus.close()

    async def _send_acks(self) -> None:
        while True:
            request = await self._acks.get()
            response = await self._persist(self._stub.AckStep, request)
            if not response.accepted:
                self._fence(f"ack of step {request.step}", request.generation, response.current_generation)
                return
            with self._condition:
                self._acked += 1
                self._condition.notify_all()

    async def _persist(self, method: Any, request: Any) -> Any:
        """Every method here is idempotent, so a lost answer is asked for again, with the same request."""
        patience = _INTERNAL_TRIES
        while True:
            try:
                return await call(method, request, timeout_s=_CALL_TIMEOUT_S, retry_s=math.inf)
            except UnreachableError as error:
                log.info("coordinator does not answer; trying again", reason=error.message)
            except SpecfleetError as error:
                # Its database is away, say. The samples of this step are trained: leaving would train them again.
                patience -= 1
                if error.code != INTERNAL_CODE or not patience:
                    raise
                log.warning("coordinator failed; trying again", reason=error.message)
                await asyncio.sleep(_INTERNAL_PAUSE_S)

    def _fence(self, what: str, generation: int, current: int = 0) -> None:
        log.warning("the coordinator refused this generation", refused=what, generation=generation, current=current)
        with self._condition:
            self.fenced = True
            self._condition.notify_all()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        self._loop.call_soon_threadsafe(self._keep, work)

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            with self._condition:
                self._failure = self._failure or error
                self._condition.notify_all()

    # On the caller's thread.

    def _wait(self, work: Coroutine[Any, Any, T], give_up: Callable[[], bool]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        while True:
            try:
                return future.result(timeout=_POLL_S)
            except concurrent.futures.TimeoutError:
                if future.done():
                    raise
                self.check()
                if give_up():
                    future.cancel()
                    raise LinkAbandoned from None
