"""Who is still there: leases that are over, workers and agents that fell silent, pools that live workers report."""

import structlog
from sqlalchemy import Connection

from specfleet.coordinator import metrics
from specfleet.coordinator.facts import RunFacts
from specfleet.coordinator.hub import LOST_AFTER_MS, Hub, Pool, now_ms
from specfleet.coordinator.launching import end_launch
from specfleet.coordinator.ledger import fleet, leases
from specfleet.coordinator.ledger import runs as run_rows

log = structlog.get_logger()


class Liveness:
    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    async def one_pass(self) -> None:
        expired = await self._hub.ledger.write(self._look)
        await self.refresh_pools()
        for facts, n in expired:
            metrics.LEASES_EXPIRED.labels(facts.run_id).inc(n)
            log.warning("leases expired", run=facts.run_id, tasks=n)
        if expired:
            self._hub.outbox.set()
            self._hub.dispatch.set()

    def _look(self, conn: Connection) -> list[tuple[RunFacts, int]]:
        now = now_ms()
        gone = []
        for worker in fleet.all_workers(conn):
            if not worker.lost and worker.seen_ms < now - LOST_AFTER_MS:
                fleet.put_worker(conn, worker_id=worker.worker_id, lost=1)
                gone.append(worker.worker_id)
                log.warning("capture worker lost", worker=worker.worker_id, silent_s=(now - worker.seen_ms) / 1000)
        for agent in fleet.all_agents(conn):
            if not agent.lost and agent.seen_ms < now - LOST_AFTER_MS:
                fleet.put_agent(conn, agent_id=agent.agent_id, lost=1)
                log.warning("trainer agent lost", agent=agent.agent_id, silent_s=(now - agent.seen_ms) / 1000)
                for node in fleet.nodes(conn, agent_id=agent.agent_id):
                    end_launch(self._hub, conn, node.launch_id, 0, f"agent {agent.agent_id} fell silent")
        expired = []
        for row in run_rows.active(conn):
            facts = self._hub.facts(row)
            if n := leases.expire(conn, facts, now, workers=gone):
                expired.append((facts, n))
        return expired

    async def refresh_pools(self) -> None:
        """What the stores hold, as their live workers say."""

        def read(conn: Connection) -> tuple[list[fleet.WorkerRow], list[run_rows.RunRow], int]:
            agents = sum(not agent.lost for agent in fleet.all_agents(conn))
            return fleet.live_workers(conn), run_rows.active(conn), agents

        workers, active, agents = await self._hub.ledger.read(read)
        pools: dict[str, Pool] = {}
        for worker in workers:
            if worker.store and worker.capacity_bytes > 0:
                known = pools.get(worker.store)
                # Workers of one pool report the same capacity; the smallest is the safe one while they disagree.
                capacity = min(worker.capacity_bytes, known.capacity_bytes) if known else worker.capacity_bytes
                pools[worker.store] = Pool(worker.store, capacity)
        # A pool whose workers are all away keeps its numbers: its reservations are still there.
        if new := {**self._hub.pools, **pools}:
            if new != self._hub.pools:
                self._hub.dispatch.set()
            self._hub.pools = new
        self._hub.sharing = {}
        for row in active:
            if row.store and not row.final and row.wanted == "run":
                self._hub.sharing[row.store] = self._hub.sharing.get(row.store, 0) + 1
        metrics.WORKERS_LIVE.set(len(workers))
        metrics.AGENTS_LIVE.set(agents)
