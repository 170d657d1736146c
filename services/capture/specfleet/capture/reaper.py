"""Deletes objects the coordinator no longer needs, and tells it so. Off every critical path."""

import asyncio

import structlog
from google.protobuf.message import DecodeError

from specfleet.bus.base import Bus, Message
from specfleet.capture import metrics
from specfleet.capture.control import Control
from specfleet.contracts.errors import SpecfleetError, StoreError
from specfleet.contracts.ids import releases_subject
from specfleet.store.base import FeatureStore
from specfleet.wire.records_pb2 import Release

log = structlog.get_logger()

MAX_FETCH = 64
FETCH_WAIT_S = 0.5
# An object may be under a read lease for some seconds (Mooncake); sooner is pointless.
RETRY_S = 2.0


class Reaper:
    """Consumes releases.{store}. At-least-once: deleting an absent object succeeds and confirming twice is harmless."""

    def __init__(self, control: Control, bus: Bus, store: FeatureStore) -> None:
        self._control, self._bus, self._store = control, bus, store

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop`. Outages of store, bus and coordinator are waited out; the ledger's outbox is the memory."""
        name = self._store.name
        subscription = await self._bus.subscribe(releases_subject(name), f"reaper-{name}", ack_wait_s=60.0)
        try:
            while not stop.is_set():
                messages = await subscription.fetch(MAX_FETCH, FETCH_WAIT_S)
                if messages:
                    await self._reap(messages)
        finally:
            await subscription.close()

    async def _reap(self, messages: list[Message]) -> None:
        deleted: list[Message] = []
        confirmed: list[int] = []
        for message in messages:
            try:
                release = Release.FromString(message.data)
            except DecodeError as error:
                log.error("dropped a message that is not a Release", subject=message.subject, error=str(error))
                await message.ack()
                continue
            if await self._delete(release):
                deleted.append(message)
                confirmed.append(release.outbox_id)
            else:
                metrics.RELEASE_RETRIES.inc()
                await message.nak(RETRY_S)
        if not deleted:
            return
        try:
            await self._control.confirm(confirmed)
        except SpecfleetError as error:
            # The coordinator answered with an error: it publishes unconfirmed entries again, so nothing is lost.
            log.warning("confirmation refused", outbox_ids=confirmed, error=str(error))
        for message in deleted:
            await message.ack()

    async def _delete(self, release: Release) -> bool:
        try:
            left = await asyncio.to_thread(self._store.remove, list(release.keys))
        except StoreError as error:
            log.warning("delete failed; trying again", outbox_id=release.outbox_id, error=str(error))
            return False
        if left:
            log.info("objects still in use; trying again", outbox_id=release.outbox_id, keys=left)
            return False
        metrics.RELEASED_OBJECTS.inc(len(release.keys))
        return True
