"""Takes sample references from the bus: commits them to SQL first, acks them second."""

from collections import defaultdict

import structlog
from google.protobuf.message import DecodeError
from sqlalchemy import Connection

from specfleet.bus.base import Message, Subscription
from specfleet.coordinator import metrics
from specfleet.coordinator.facts import RunFacts
from specfleet.coordinator.hub import Hub, now_ms
from specfleet.coordinator.ledger import fleet, outbox
from specfleet.coordinator.ledger import runs as run_rows
from specfleet.coordinator.ledger import samples as sample_rows
from specfleet.policies.breaker import BreakerState
from specfleet.wire.records_pb2 import SampleRef

log = structlog.get_logger()

SUBJECT = "samples.*"
DURABLE = "coordinator"
MAX_BATCH = 256
FETCH_S = 5.0


class SampleIngest:
    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._subscription: Subscription | None = None

    async def one_pass(self) -> None:
        """One batch. The fetch is the wait: there is no pause between batches."""
        if self._subscription is None:
            self._subscription = await self._hub.bus.subscribe(SUBJECT, DURABLE, max_ack_pending=4 * MAX_BATCH)
        messages = await self._subscription.fetch(MAX_BATCH, FETCH_S)
        if not messages:
            return
        with metrics.INGEST_SECONDS.time():
            await self._commit(messages)
        for message in messages:
            await message.ack()
        self._hub.plan.set()

    async def _commit(self, messages: list[Message]) -> None:
        by_run: dict[str, list[SampleRef]] = defaultdict(list)
        for message in messages:
            try:
                ref = SampleRef.FromString(message.data)
            except DecodeError as error:
                # Nobody can repair it; the attempt's lease runs out.
                log.error("sample reference is not readable", subject=message.subject, error=str(error))
                continue
            by_run[ref.attempt.task.run_id].append(ref)

        def commit(conn: Connection) -> list[tuple[RunFacts, sample_rows.Ingested]]:
            known = {row.run_id: row for row in run_rows.every(conn) if row.run_id in by_run}
            results = []
            for run_id, refs in by_run.items():
                if run_id in known:
                    facts = self._hub.facts(known[run_id])
                    results.append((facts, sample_rows.accept(conn, facts, refs, now_ms())))
                else:
                    for ref in refs:
                        outbox.discard_keys(conn, 0, ref.store, [feature.key for feature in ref.features], now_ms())
            _close_breakers(conn, {worker for _, result in results for worker in result.workers})
            return results

        for facts, result in await self._hub.ledger.write(commit):
            self._report(facts, result)

    def _report(self, facts: RunFacts, result: sample_rows.Ingested) -> None:
        self._hub.rates[facts.run].captured.add(result.tokens)
        for outcome, n in (
            ("accepted", result.accepted),
            ("duplicate", result.duplicates),
            ("stale", result.stale),
            ("rejected", len(result.rejected)),
        ):
            if n:
                metrics.INGESTED.labels(facts.run_id, outcome).inc(n)
        for line in result.rejected:
            log.warning("sample rejected", run=facts.run_id, sample=line)
        if result.stale or result.rejected:
            self._hub.outbox.set()
            self._hub.dispatch.set()


def _close_breakers(conn: Connection, workers: set[str]) -> None:
    for worker_id in sorted(workers):
        row = fleet.worker(conn, worker_id)
        if row is None:
            continue
        state = fleet.breaker(row)
        if state.failures or state.state is not BreakerState.CLOSED:
            state.succeeded()
            fleet.put_breaker(conn, worker_id, state)
