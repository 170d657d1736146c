"""The coordinator's life: open the ledger, reach the bus, recover, serve, stop."""

import asyncio
from dataclasses import dataclass
from pathlib import Path

import structlog
from sqlalchemy import Connection

from specfleet.bus.factory import open_bus
from specfleet.contracts.errors import HostError
from specfleet.coordinator.api.capture import CaptureApi
from specfleet.coordinator.api.runs import RunApi
from specfleet.coordinator.api.trainer import TrainerApi
from specfleet.coordinator.hub import Hub, Wake, now_ms
from specfleet.coordinator.ledger import Ledger, fleet, leases
from specfleet.coordinator.ledger import runs as run_rows
from specfleet.coordinator.loops import dispatcher, forever, outbox, planner
from specfleet.coordinator.loops.liveness import Liveness
from specfleet.coordinator.loops.losses import Losses
from specfleet.coordinator.loops.runs import Runs, observe
from specfleet.coordinator.loops.samples import SampleIngest
from specfleet.rpc.server import RpcServer
from specfleet.telemetry.http import TelemetryServer
from specfleet.telemetry.process import own_folder, stop_event
from specfleet.wire.capture_pb2_grpc import add_CaptureControlServicer_to_server
from specfleet.wire.run_pb2_grpc import add_RunServiceServicer_to_server
from specfleet.wire.trainer_pb2_grpc import add_TrainerControlServicer_to_server

log = structlog.get_logger()

CARE_TICK_S = 1.0
STOP_GRACE_S = 2.0


@dataclass(frozen=True)
class Options:
    listen: str
    metrics: str
    nats: str
    ledger: str
    data_dir: Path
    insecure: bool = False


class Coordinator:
    """Start, then stop. Everything it knows at start comes from SQL."""

    def __init__(self, options: Options) -> None:
        self._options = options
        folder = own_folder(options.data_dir)
        url = options.ledger or f"sqlite:///{folder.resolve() / 'ledger.db'}"
        self._ledger = Ledger(url)
        self._bus = open_bus(options.nats)
        self.hub = Hub(self._ledger, self._bus)
        self._server = RpcServer(options.listen, insecure=options.insecure)
        self._telemetry = TelemetryServer(options.metrics, self._ready, insecure=options.insecure)
        self._tasks: list[asyncio.Task[None]] = []
        self._serving = False
        self.port = 0
        self.metrics_port = 0

    async def start(self) -> None:
        self.hub.attach(asyncio.get_running_loop())
        await self._ledger.open()
        self.metrics_port = await self._telemetry.start()
        await self._ledger.write(self._recover)
        liveness = Liveness(self.hub)
        await liveness.refresh_pools()
        self._server.add(add_RunServiceServicer_to_server, RunApi(self.hub), "specfleet.v1.RunService")
        self._server.add(add_CaptureControlServicer_to_server, CaptureApi(self.hub), "specfleet.v1.CaptureControl")
        self._server.add(add_TrainerControlServicer_to_server, TrainerApi(self.hub), "specfleet.v1.TrainerControl")
        self.port = await self._server.start()
        self._tasks = [asyncio.create_task(self._work(liveness), name="coordinator-loops")]

    async def _work(self, liveness: Liveness) -> None:
        """Calls are answered while the bus is away; the loops start when it is there."""
        await self._bus.connect()
        hub = self.hub
        plan, runs, samples = planner.Planner(hub), Runs(hub), SampleIngest(hub)
        losses = Losses(hub, plan)

        async def care() -> None:
            await liveness.one_pass()
            await runs.one_pass()
            await hub.ledger.read(self._observe)

        async with asyncio.TaskGroup() as group:
            group.create_task(forever("dispatch", hub.dispatch, dispatcher.TICK_S, dispatcher.Dispatcher(hub).one_pass))
            group.create_task(forever("plan", hub.plan, planner.TICK_S, plan.one_pass))
            group.create_task(forever("samples", Wake(), 0.0, samples.one_pass))  # its fetch is the wait
            group.create_task(forever("outbox", hub.outbox, outbox.TICK_S, outbox.OutboxPublisher(hub).one_pass))
            group.create_task(forever("care", hub.care, CARE_TICK_S, care))
            group.create_task(forever("losses", Wake(), 2 * CARE_TICK_S, losses.one_pass))
            group.create_task(hub.publish_events())
            self._serving = True

    def _recover(self, conn: Connection) -> None:
        """While the coordinator was away nobody could renew a lease or be heard: everyone gets a full term."""
        now = now_ms()
        fleet.see_everyone(conn, now)
        rows = run_rows.active(conn)
        for row in rows:
            leases.extend_after_restart(conn, self.hub.facts(row), now)
        if rows:
            log.info("recovered from the ledger", active_runs=[row.run_id for row in rows])

    def _observe(self, conn: Connection) -> None:
        for row in run_rows.active(conn):
            observe(conn, self.hub.facts(row), row)

    def _ready(self) -> tuple[bool, str]:
        return self._serving, "" if self._serving else f"waiting for the bus at {self._options.nats}"

    async def failed(self) -> None:
        """Returns when a loop ended, which none does by itself; raises what it ended with."""
        await asyncio.gather(*self._tasks)

    async def stop(self) -> None:
        await self._server.stop(STOP_GRACE_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._bus.close()
        await self._ledger.close()
        await self._telemetry.stop()
        self.hub.prompts.close()


async def run(options: Options) -> None:
    """Until SIGTERM or SIGINT."""
    stop = stop_event()
    coordinator = Coordinator(options)
    await coordinator.start()
    log.info("coordinator serves", port=coordinator.port, metrics_port=coordinator.metrics_port)
    stopping = asyncio.create_task(stop.wait())
    failing = asyncio.create_task(coordinator.failed())
    try:
        await asyncio.wait({stopping, failing}, return_when=asyncio.FIRST_COMPLETED)
        if failing.done():
            await failing
            raise HostError("SF-COORDINATOR-STOPPED", "the coordinator's loops ended unexpectedly; restart it")
    finally:
        stopping.cancel()
        failing.cancel()
        await coordinator.stop()
