"""The life of a capture worker: register, beat, load what it is told to serve, attest, capture, switch, drain."""

import asyncio
import os
import socket
import time
from dataclasses import dataclass, field

import structlog

from specfleet.bus.base import Bus
from specfleet.capture import metrics
from specfleet.capture.control import Control
from specfleet.capture.ends import Patience
from specfleet.capture.engines.base import Engine, ServingEngine
from specfleet.capture.engines.table import EngineLoader
from specfleet.capture.held import Held
from specfleet.capture.pipeline import Limits, Pipeline
from specfleet.contracts.errors import SpecfleetError
from specfleet.store.base import FeatureStore
from specfleet.wire.capture_pb2 import (
    AttestWorkerResponse,
    HeartbeatWorkerRequest,
    HeartbeatWorkerResponse,
    PoolStats,
    RegisterWorkerRequest,
)
from specfleet.wire.records_pb2 import CaptureContract

log = structlog.get_logger()

# Loading fails for reasons that pass (memory, a file system that is not mounted yet) and for reasons that do not.
LOAD_RETRY_S = (2.0, 5.0, 15.0, 30.0)
# An engine that served this long was a good one: when it is lost, the next is loaded at once.
HEALTHY_S = 60.0
# The whole drain, including the batch in the engine. Less than the 15 s that supervisors wait before they kill.
DRAIN_S = 12.0


@dataclass
class Assignment:
    """What this worker should serve. `changed` is set while a pipeline for something else should end."""

    contract: CaptureContract = field(default_factory=CaptureContract)
    contract_hash: str = ""
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class Worker:
    def __init__(
        self,
        *,
        control: Control,
        bus: Bus,
        store: FeatureStore,
        load_engine: EngineLoader,
        engine_name: str,
        bound_target: str = "",
        patience: Patience = Patience(),
    ) -> None:
        self._control, self._bus, self._store, self._load_engine = control, bus, store, load_engine
        self._engine_name, self._bound_target, self._patience = engine_name, bound_target, patience
        self._held, self._limits = Held(), Limits()
        self._wanted = Assignment()
        self._pool = PoolStats(store=store.name)
        self._engine: Engine | None = None
        self._accepted = False
        self._state, self._serving = "STARTING", ""
        self._registered, self._trouble, self._quarantined = False, "", ""
        self._loading: asyncio.Task[Engine] | None = None
        self._setbacks = 0
        """Engines of the present contract in a row that did not load or did not last."""
        self._heartbeat_s = 1.0

    def ready(self) -> tuple[bool, str]:
        """For /readyz: registered and not in trouble. A worker without an assignment is ready: it waits for one."""
        if self._trouble:
            return False, self._trouble
        return self._registered, f"{self._state} {self._serving}".strip() if self._registered else "not registered yet"

    async def run(self, stop: asyncio.Event) -> None:
        """Serves until `stop`, then drains: the batch in the engine is finished, everything else is returned."""
        helpers = [asyncio.create_task(self._watch_pool()), asyncio.create_task(self._beat())]
        serving = asyncio.create_task(self._serve(stop))
        stopping = asyncio.create_task(stop.wait())
        everything = [serving, stopping, *helpers]
        try:
            await asyncio.wait(everything, return_when=asyncio.FIRST_COMPLETED)
            if stop.is_set():
                self._state = "DRAINING"
                self._wanted.changed.set()
                if self._loading is not None:
                    self._loading.cancel()
                # Helpers go on: claims are renewed until the last one is announced or returned.
                _, left = await asyncio.wait([serving], timeout=DRAIN_S)
                if left:
                    log.error("drain did not end in time; leases run out", seconds=DRAIN_S, in_hand=len(self._held))
            # None of them ends by itself before `stop`; an error must end the worker instead of leaving it deaf.
            for task in (serving, *helpers):
                if task.done():
                    task.result()
        finally:
            for pending in everything:
                pending.cancel()
            await asyncio.gather(*everything, return_exceptions=True)

    # -- coordinator ----------------------------------------------------------------------------------------------

    async def _beat(self) -> None:
        await self._register()
        while True:
            try:
                answer = await self._control.heartbeat(self._heartbeat())
            except SpecfleetError as error:
                # Capture goes on without a coordinator: claims hold until their deadline, references go to the bus.
                log.warning("heartbeat failed", error=str(error))
            else:
                await self._obey(answer)
            await asyncio.sleep(self._heartbeat_s)

    async def _register(self) -> None:
        request = RegisterWorkerRequest(
            worker_id=self._control.worker_id,
            host=socket.gethostname(),
            pid=os.getpid(),
            engine=self._engine_name,
            engine_version=self._engine.version if self._engine else "",
            pool=self._pool,
            bound_target=self._bound_target,
        )
        while True:
            try:
                answer = await self._control.register(request)
                break
            except SpecfleetError as error:
                log.warning("registration failed; trying again", error=str(error))
                await asyncio.sleep(self._heartbeat_s)
        # Bounded below: a coordinator that answers 0 must not turn heartbeats into a busy loop.
        self._heartbeat_s = max(0.05, answer.heartbeat_s or self._heartbeat_s)
        self._registered = True
        log.info("registered", worker=self._control.worker_id, heartbeat_s=self._heartbeat_s)

    def _heartbeat(self) -> HeartbeatWorkerRequest:
        return HeartbeatWorkerRequest(
            worker_id=self._control.worker_id,
            state=self._state,
            contract_hash=self._serving,
            pool=self._pool,
            claims=self._held.claims(),
            numbers={"in_hand": float(len(self._held)), **_totals()},
        )

    async def _obey(self, answer: HeartbeatWorkerResponse) -> None:
        if answer.unknown:
            # A coordinator that forgot the worker has also forgotten what it attested.
            self._limits.may_pull = False
            await self._register()
            if self._engine is not None:
                self._accepted = False
                await self._attest(self._engine)
            return
        revoked = self._held.revoke(answer.revoked)
        if revoked:
            log.info("claims revoked", samples=revoked)
        if answer.max_batch_tokens:
            self._limits.max_batch_tokens = answer.max_batch_tokens
        if answer.quarantined != self._quarantined:
            self._quarantined = answer.quarantined
            log.warning("quarantined" if answer.quarantined else "quarantine lifted", reason=answer.quarantined)
        self._limits.may_pull = self._accepted and answer.may_pull and not answer.quarantined
        if answer.contract_hash and answer.contract_hash != self._wanted.contract_hash:
            log.info("contract assigned", contract=answer.contract_hash, target=answer.contract.target)
            self._wanted.contract, self._wanted.contract_hash = answer.contract, answer.contract_hash
            self._limits.may_pull = False
            self._wanted.changed.set()

    async def _attest(self, engine: Engine) -> None:
        answer: AttestWorkerResponse = await self._control.attest(
            self._serving, engine.attest(), engine.version, engine.plugin_version
        )
        self._accepted = answer.accepted
        self._trouble = "" if answer.accepted else f"attestation refused: {'; '.join(answer.mismatches)}"
        if not answer.accepted:
            log.error("attestation refused", contract=self._serving, mismatches=list(answer.mismatches))

    # -- engine ---------------------------------------------------------------------------------------------------

    async def _serve(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            await self._wanted.changed.wait()
            if stop.is_set():
                return
            self._wanted.changed.clear()
            if self._serving != self._wanted.contract_hash:
                self._setbacks = 0
            contract, self._serving = self._wanted.contract, self._wanted.contract_hash
            engine = await self._load(contract)
            if engine is None:
                continue
            started = time.monotonic()
            try:
                await self._run_pipeline(engine, contract)
            finally:
                self._engine, self._accepted, self._limits.may_pull = None, False, False
                await engine.close()
            lasted = time.monotonic() - started > HEALTHY_S
            self._setbacks = 0 if lasted else self._setbacks + 1

    async def _run_pipeline(self, engine: Engine, contract: CaptureContract) -> None:
        """Until another contract is assigned, the worker stops, or the engine is lost: then it is loaded anew."""
        pipeline = Pipeline(
            engine=engine,
            contract=contract,
            contract_hash=self._serving,
            bus=self._bus,
            store=self._store,
            control=self._control,
            held=self._held,
            limits=self._limits,
            stop=self._wanted.changed,
            patience=self._patience,
        )
        watch = asyncio.create_task(self._reload_when_lost(engine))
        try:
            await pipeline.run()
        finally:
            watch.cancel()

    async def _reload_when_lost(self, engine: Engine) -> None:
        if isinstance(engine, ServingEngine):
            await engine.lost.wait()
            self._limits.may_pull = False
            self._state, self._trouble = "LOADING", "the engine was lost; it is loaded anew"
            self._wanted.changed.set()

    async def _load(self, contract: CaptureContract) -> Engine | None:
        """The engine, loaded and attested (accepted or not); None when the assignment changed or the worker stops first."""
        while True:
            self._state = "LOADING"
            if self._setbacks and await self._changes_within(LOAD_RETRY_S[min(self._setbacks, len(LOAD_RETRY_S)) - 1]):
                return None
            started = time.perf_counter()
            self._loading = asyncio.create_task(self._load_attested(contract))
            try:
                engine = await self._loading
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise
                return None  # only the loading was cancelled: the worker stops
            except Exception as error:
                # Whatever a model file or a library raises: this worker cannot serve now, and stays visible saying why.
                expected = isinstance(error, SpecfleetError)
                reason = str(error) if expected else f"{type(error).__name__}: {error}"
                self._trouble = f"cannot load {contract.target}: {reason}"
                log.error("engine did not load", target=contract.target, reason=reason, exc_info=not expected)
                self._setbacks += 1
                continue
            finally:
                self._loading = None
            self._state = "DRAINING" if self._wanted.changed.is_set() else "READY"
            seconds = time.perf_counter() - started
            log.info("engine ready", engine=engine.version, accepted=self._accepted, seconds=seconds)
            return engine

    async def _load_attested(self, contract: CaptureContract) -> Engine:
        engine = self._engine = await self._load_engine(contract, self._store)
        try:
            await self._attest(engine)
        except BaseException:
            self._engine = None
            await engine.close()
            raise
        return engine

    async def _changes_within(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self._wanted.changed.wait(), seconds)
        except TimeoutError:
            return False
        return True

    # -- pool -----------------------------------------------------------------------------------------------------

    async def _watch_pool(self) -> None:
        """Apart from the heartbeat: a store that hangs must not let leases run out."""
        while True:
            try:
                stats = await asyncio.to_thread(self._store.stats)
                self._pool = PoolStats(
                    store=self._store.name, capacity_bytes=stats.capacity_bytes, used_bytes=stats.used_bytes
                )
            except SpecfleetError as error:
                log.warning("pool statistics unavailable", error=str(error))
            await asyncio.sleep(self._heartbeat_s)


def _totals() -> dict[str, float]:
    """Lifetime counters of this process, for `specctl fleet list`."""
    return {
        "captured_tokens": metrics.total(metrics.CAPTURED_TOKENS),
        "captured_samples": metrics.total(metrics.CAPTURED_SAMPLES),
    }
