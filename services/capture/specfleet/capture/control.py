"""What a worker asks of the coordinator, and how long an absent one is waited for."""

import math
import time
from collections.abc import Sequence
from typing import Any

import grpc

from specfleet.contracts.errors import UnreachableError
from specfleet.rpc.client import call, connect
from specfleet.wire import capture_pb2 as pb
from specfleet.wire.capture_pb2_grpc import CaptureControlStub
from specfleet.wire.records_pb2 import CaptureContract, TaskAttempt

# One try. Long enough for a coordinator that is busy committing; short enough to notice one that is gone.
CALL_S = 10.0


class Control:
    """A thin client of CaptureControl. Every method but `heartbeat` is repeated while the coordinator does not answer.

    All of them are idempotent at the coordinator. Raises UnreachableError once `retry_s` has passed, and whatever
    SpecfleetError the coordinator answers with.
    """

    def __init__(self, coordinator: str, worker_id: str) -> None:
        self.worker_id = worker_id
        self._address = coordinator
        self._channel: grpc.aio.Channel = connect(coordinator)
        self._stub: Any = CaptureControlStub(self._channel)

    async def register(self, request: pb.RegisterWorkerRequest) -> pb.RegisterWorkerResponse:
        return await self._call(self._stub.RegisterWorker, request, math.inf)

    async def heartbeat(self, request: pb.HeartbeatWorkerRequest) -> pb.HeartbeatWorkerResponse:
        """Not repeated: the next heartbeat carries newer facts."""
        return await self._call(self._stub.HeartbeatWorker, request, 0.0)

    async def attest(
        self, contract_hash: str, facts: CaptureContract, engine_version: str, plugin_version: str
    ) -> pb.AttestWorkerResponse:
        request = pb.AttestWorkerRequest(
            worker_id=self.worker_id,
            contract_hash=contract_hash,
            facts=facts,
            engine_version=engine_version,
            plugin_version=plugin_version,
        )
        return await self._call(self._stub.AttestWorker, request, math.inf)

    async def claim(self, attempts: Sequence[TaskAttempt], retry_s: float) -> pb.ClaimTasksResponse:
        request = pb.ClaimTasksRequest(worker_id=self.worker_id, attempts=attempts)
        return await self._call(self._stub.ClaimTasks, request, retry_s)

    async def fail(self, failures: Sequence[pb.TaskFailure], retry_s: float) -> None:
        request = pb.FailTasksRequest(worker_id=self.worker_id, failures=failures)
        await self._call(self._stub.FailTasks, request, retry_s)

    async def confirm(self, outbox_ids: Sequence[int]) -> None:
        request = pb.ConfirmReleasesRequest(worker_id=self.worker_id, outbox_ids=outbox_ids)
        await self._call(self._stub.ConfirmReleases, request, math.inf)

    async def close(self) -> None:
        await self._channel.close(grace=None)

    async def _call(self, method: Any, request: Any, retry_s: float) -> Any:
        give_up_at = time.monotonic() + retry_s
        while True:
            left_s = max(0.0, give_up_at - time.monotonic())
            try:
                return await call(method, request, timeout_s=CALL_S, retry_s=left_s, address=self._address)
            except UnreachableError:
                # rpc.call repeats refused connections; an answer that never came is repeated here.
                if time.monotonic() >= give_up_at or left_s == 0.0:
                    raise
