"""Publishes deletions that are due, and again those that no worker has confirmed."""

from sqlalchemy import Connection

from specfleet.contracts.ids import releases_subject
from specfleet.coordinator.hub import Hub, now_ms
from specfleet.coordinator.ledger import fleet, outbox

TICK_S = 1.0
REPUBLISH_MS = 15_000


class OutboxPublisher:
    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    async def one_pass(self) -> None:
        def due(conn: Connection) -> list[outbox.Due]:
            # Without a worker nobody reads the queue, and repetitions would only fill it.
            alive = any(not row.lost for row in fleet.live_workers(conn))
            now = now_ms()
            return outbox.due(conn, now, REPUBLISH_MS if alive else now)

        batch = await self._hub.ledger.write(due)
        if batch:
            await self._hub.bus.publish_many(
                [
                    (releases_subject(item.release.store), item.release.SerializeToString(), item.message_id)
                    for item in batch
                ]
            )
        if len(batch) == outbox.PUBLISH_BATCH:
            self._hub.outbox.set()
