"""Puts the capture process together: store, bus, coordinator client, worker, reaper, telemetry; and takes it apart."""

import asyncio
import os
import socket
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

import structlog

from specfleet.bus.factory import open_bus
from specfleet.capture.control import Control
from specfleet.capture.engines.table import EngineOptions, engine_loader
from specfleet.capture.reaper import Reaper
from specfleet.capture.worker import Worker
from specfleet.contracts.errors import HostError, StoreError
from specfleet.store.base import FeatureStore
from specfleet.store.factory import open_store
from specfleet.target.hub import pinned_target
from specfleet.telemetry import logs
from specfleet.telemetry.http import TelemetryServer
from specfleet.telemetry.process import stop_event

log = structlog.get_logger()

STORE_RETRY_S = 1.0


@dataclass(frozen=True)
class Settings:
    """The command line of specfleet-capture."""

    coordinator: str
    nats: str
    store: str
    metrics: str
    worker_id: str
    engine: EngineOptions
    insecure: bool = False


async def serve(settings: Settings) -> None:
    """Runs one capture worker until SIGTERM or SIGINT. Raises ConfigError for settings that can never work."""
    logs.configure("capture")
    load_engine = engine_loader(settings.engine)
    stop = stop_event()
    store = await _open_store(settings.store, stop)
    if store is None:
        return
    bus = open_bus(settings.nats)
    control = Control(settings.coordinator, settings.worker_id or default_worker_id())
    worker = Worker(
        control=control,
        bus=bus,
        store=store,
        load_engine=load_engine,
        engine_name=settings.engine.engine,
        bound_target=await asyncio.to_thread(pinned_target, settings.engine.target) if settings.engine.target else "",
    )
    telemetry = TelemetryServer(settings.metrics, worker.ready, insecure=settings.insecure)
    try:
        port = await telemetry.start()
        log.info("capture worker starts", worker=control.worker_id, metrics_port=port, engine=settings.engine.engine)
        if await _unless(stop, bus.connect()):
            await _run(worker, Reaper(control, bus, store), stop)
    finally:
        await telemetry.stop()
        await control.close()
        await bus.close()
        await asyncio.to_thread(store.close)


async def _run(worker: Worker, reaper: Reaper, stop: asyncio.Event) -> None:
    reaping = asyncio.create_task(reaper.run(stop))
    working = asyncio.create_task(worker.run(stop))
    try:
        await asyncio.wait({working, reaping}, return_when=asyncio.FIRST_EXCEPTION)
        if working.done():
            working.result()
        if reaping.done():
            reaping.result()
    finally:
        for task in (working, reaping):
            task.cancel()
        await asyncio.gather(working, reaping, return_exceptions=True)


async def _open_store(url: str, stop: asyncio.Event) -> FeatureStore | None:
    """Waits for a store that is not up yet; a wrong URL (ConfigError) is raised at once."""
    while not stop.is_set():
        try:
            return await asyncio.to_thread(open_store, url)
        except (StoreError, HostError) as error:
            log.warning("store not reachable yet", error=str(error))
        await _unless(stop, asyncio.sleep(STORE_RETRY_S))
    return None


async def _unless(stop: asyncio.Event, coroutine: Coroutine[Any, Any, Any]) -> bool:
    """Awaits the coroutine; False when `stop` came first (the coroutine is cancelled then)."""
    task = asyncio.create_task(coroutine)
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait([task, stopping], return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not task.done():
        task.cancel()
        return False
    task.result()
    return True


def default_worker_id() -> str:
    """Stable over restarts on one host as long as one worker runs there; give --worker-id when several do."""
    return os.environ.get("HOSTNAME") or socket.gethostname() or "capture"
