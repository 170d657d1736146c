"""Where coordinator and gate are, and calls to them. gRPC is imported here, so this module is imported late."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import grpc

from specfleet.contracts.errors import HostError
from specfleet.contracts.states import TERMINAL_RUN_STATES
from specfleet.ctl.state import is_running, read_state, running_state_dir
from specfleet.rpc.client import call_sync, connect_sync
from specfleet.rpc.errors import from_rpc
from specfleet.wire.gate_pb2_grpc import GateServiceStub
from specfleet.wire.run_pb2 import RunSnapshot, WatchRunRequest
from specfleet.wire.run_pb2_grpc import RunServiceStub

Response = TypeVar("Response")

CALL_TIMEOUT_S = 30.0
# The supervisor restarts a killed coordinator within seconds; a watcher waits for it rather than giving up.
WATCH_PATIENCE_S = 60.0


def find_address(service: str, given: str, state_dir: Path | None) -> str:
    """An address given by flag or environment, else the running embedded stack's. Raises HostError SF-CTL-NO-ADDRESS."""
    if given:
        return given
    folder = running_state_dir(state_dir)
    state = read_state(folder) if is_running(folder) else None
    if state is None or service not in state.addresses:
        raise HostError(
            "SF-CTL-NO-ADDRESS",
            f"no stack runs in {folder}: start one with `specctl up --detach`, "
            f"or pass --{service} HOST:PORT (or SPECFLEET_{service.upper()})",
        )
    return state.addresses[service]


class Client:
    """One channel to the coordinator (or gate). Calls raise SpecfleetError; an unreachable service is UnreachableError."""

    def __init__(self, address: str, patience_s: float = 0.0) -> None:
        """patience_s: how long calls wait for a service that is not there; 0: a person gets the answer at once."""
        self.address, self._patience_s = address, patience_s
        self._channel = connect_sync(address)
        self.runs = RunServiceStub(self._channel)
        self.gate = GateServiceStub(self._channel)

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def call(
        self,
        method: Callable[..., Response],
        request: Any,
        *,
        timeout_s: float | None = CALL_TIMEOUT_S,
    ) -> Response:
        return call_sync(method, request, timeout_s=timeout_s, retry_s=self._patience_s, address=self.address)

    def watch(self, run_id: str, interval_s: float = 1.0) -> Iterator[RunSnapshot]:
        """Snapshots until the run is terminal; survives a restart of the coordinator."""
        last_seen = time.monotonic()
        while True:
            try:
                for response in self.runs.WatchRun(WatchRunRequest(run_id=run_id, interval_s=interval_s)):
                    last_seen = time.monotonic()
                    yield response.run
                    if response.run.state in TERMINAL_RUN_STATES:
                        return
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE or time.monotonic() - last_seen > WATCH_PATIENCE_S:
                    raise from_rpc(error, self.address) from None
            time.sleep(min(interval_s, 0.5))
