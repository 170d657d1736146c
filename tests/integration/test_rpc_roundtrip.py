"""Real servers and channels: errors there and back, health, reflection, restarts."""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from specfleet.contracts import errors
from specfleet.contracts.errors import ConfigError, HostError, SpecfleetError, UnreachableError
from specfleet.rpc.client import call, call_sync, connect, connect_sync
from specfleet.rpc.errors import MAX_MESSAGE_CHARACTERS, from_rpc
from specfleet.rpc.server import RpcServer
from specfleet.wire.gate_pb2 import (
    ExportDraftRequest,
    GetGateRequest,
    GetGateResponse,
    WatchGateRequest,
    WatchGateResponse,
)
from specfleet.wire.gate_pb2_grpc import GateServiceServicer, GateServiceStub, add_GateServiceServicer_to_server

pytestmark = pytest.mark.integration
SERVICE = "specfleet.v1.GateService"


class Gate(GateServiceServicer):
    """Raises what it is told to, or echoes the id."""

    def __init__(self) -> None:
        self.failure: Exception | None = None
        self.entered = asyncio.Event()
        self.release = asyncio.Event()

    async def GetGate(self, request: GetGateRequest, context: Any) -> GetGateResponse:
        self.entered.set()
        if self.failure is not None:
            raise self.failure
        if request.gate_id == "wait":
            await self.release.wait()
        response = GetGateResponse()
        response.status.gate_id = request.gate_id
        return response

    async def WatchGate(self, request: WatchGateRequest, context: Any) -> AsyncIterator[WatchGateResponse]:
        yield WatchGateResponse()
        if self.failure is not None:
            raise self.failure

    async def ExportDraft(self, request: Any, context: Any) -> Any:
        await context.abort(grpc.StatusCode.ALREADY_EXISTS, "by hand")

    async def StartGate(self, request: Any, context: Any) -> Any:
        raise NotImplementedError


async def serve(gate: Gate, listen: str = "127.0.0.1:0") -> tuple[RpcServer, int]:
    server = RpcServer(listen)
    server.add(add_GateServiceServicer_to_server, gate, SERVICE)
    return server, await server.start()


@pytest.fixture
async def gate() -> Gate:
    return Gate()


@pytest.fixture
async def address(gate: Gate) -> AsyncIterator[str]:
    server, port = await serve(gate)
    yield f"127.0.0.1:{port}"
    await server.stop(0)


@pytest.fixture
async def stub(address: str) -> AsyncIterator[Any]:
    async with connect(address) as channel:
        yield GateServiceStub(channel)


async def test_a_call(stub: Any) -> None:
    response = await call(stub.GetGate, GetGateRequest(gate_id="g"), timeout_s=5)
    assert response.status.gate_id == "g"


@pytest.mark.parametrize(
    "failure",
    [
        errors.ConfigError("SF-CONFIG-RUN-ID", "run id 'É' is not usable"),
        errors.ContractError("SF-CONTRACT-MISMATCH", "layers: expected [1], measured [2]"),
        errors.LedgerError("SF-LEDGER-RUN-NOT-FOUND", "no run 'x'"),
        errors.StoreFullError("SF-STORE-FULL", "0 of 10 bytes free"),
        errors.UnreachableError("SF-HOST-UNREACHABLE", "the bus does not answer"),
        errors.GateError("SF-GATE-FAILED", "acceptance 1.00 is not above 1.00\nsecond line"),
        errors.SpecfleetError("SF-X", ""),
    ],
    ids=lambda failure: type(failure).__name__,
)
async def test_an_error_arrives_as_it_was_raised(gate: Gate, stub: Any, failure: SpecfleetError) -> None:
    gate.failure = failure
    with pytest.raises(SpecfleetError) as caught:
        await call(stub.GetGate, GetGateRequest(), timeout_s=5)
    assert type(caught.value) is type(failure)
    assert (caught.value.code, caught.value.message) == (failure.code, failure.message)
    assert caught.value.exit_code == failure.exit_code


async def test_a_stream_fails_with_the_error_after_its_messages(gate: Gate, stub: Any) -> None:
    gate.failure = errors.DataError("SF-DATA-MISSING", "gone")
    responses = aiter(stub.WatchGate(WatchGateRequest()))
    await anext(responses)
    with pytest.raises(grpc.RpcError) as caught:
        await anext(responses)
    error = from_rpc(caught.value)
    assert (type(error), error.code, error.message) == (errors.DataError, "SF-DATA-MISSING", "gone")


async def test_the_longest_message_fits_the_trailers(gate: Gate, stub: Any) -> None:
    # Four bytes a character, each percent-encoded: the worst a status can hold.
    gate.failure = errors.ExportError("SF-EXPORT-TENSORS", "🦊" * (MAX_MESSAGE_CHARACTERS + 1))
    with pytest.raises(errors.ExportError, match="1 more characters"):
        await call(stub.GetGate, GetGateRequest(), timeout_s=5)


async def test_an_unexpected_exception_is_internal_and_logged(gate: Gate, stub: Any) -> None:
    gate.failure = ZeroDivisionError("division by zero")
    with structlog.testing.capture_logs() as logs, pytest.raises(SpecfleetError) as caught:
        await call(stub.GetGate, GetGateRequest(), timeout_s=5)
    assert caught.value.code == "SF-RPC-INTERNAL"
    assert "ZeroDivisionError: division by zero" in caught.value.message
    (line,) = [entry for entry in logs if entry["log_level"] == "error"]
    assert line["method"] == f"/{SERVICE}/GetGate"
    assert isinstance(line["exc_info"], ZeroDivisionError)


async def test_a_status_set_by_hand_passes(stub: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.CRITICAL, "grpc"), pytest.raises(SpecfleetError, match="by hand") as caught:
        await call(stub.ExportDraft, ExportDraftRequest(), timeout_s=5)
    assert caught.value.code == "SF-RPC-ALREADY-EXISTS"


async def test_health_and_reflection(address: str) -> None:
    async with connect(address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", SERVICE):
            answer = await health.Check(health_pb2.HealthCheckRequest(service=service))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        listing = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        )
        names = {
            service.name for reply in [await anext(aiter(listing))] for service in reply.list_services_response.service
        }
        listing.cancel()
    assert {SERVICE, "grpc.health.v1.Health"} <= names


async def test_a_port_in_use_is_named(gate: Gate, address: str) -> None:
    with pytest.raises(HostError) as caught:
        await serve(gate, address)
    assert caught.value.code == "SF-HOST-PORT-IN-USE"
    assert address in caught.value.message


async def test_other_interfaces_are_refused_unless_insecure() -> None:
    with pytest.raises(ConfigError):
        RpcServer("0.0.0.0:0")
    server = RpcServer("0.0.0.0:0", insecure=True)
    assert await server.start() > 0
    await server.stop(0)


async def test_nobody_there_is_unreachable_in_one_line(free_port: Callable[[], int]) -> None:
    address = f"127.0.0.1:{free_port()}"
    async with connect(address) as channel:
        with pytest.raises(UnreachableError) as caught:
            await call(GateServiceStub(channel).GetGate, GetGateRequest(), timeout_s=5)
    with connect_sync(address) as channel, pytest.raises(UnreachableError) as caught_sync:
        await asyncio.to_thread(call_sync, GateServiceStub(channel).GetGate, GetGateRequest(), timeout_s=5)
    for error in (caught.value, caught_sync.value):
        assert error.code == "SF-HOST-UNREACHABLE"
        assert address in error.message
        assert "\n" not in str(error)


async def test_a_late_answer_is_unreachable(gate: Gate, stub: Any) -> None:
    with pytest.raises(UnreachableError, match="within the deadline"):
        await call(stub.GetGate, GetGateRequest(gate_id="wait"), timeout_s=0.1)


async def test_calls_wait_for_a_service_that_restarts(gate: Gate) -> None:
    server, port = await serve(gate)
    address = f"127.0.0.1:{port}"
    async with connect(address) as channel:
        stub: Any = GateServiceStub(channel)
        with connect_sync(address) as sync_channel:
            await call(stub.GetGate, GetGateRequest(), timeout_s=5)
            await server.stop(0)
            with pytest.raises(UnreachableError):
                await call(stub.GetGate, GetGateRequest(), timeout_s=5, retry_s=0.2)
            waiting = asyncio.create_task(call(stub.GetGate, GetGateRequest(), timeout_s=5, retry_s=math.inf))
            waiting_sync = asyncio.create_task(
                asyncio.to_thread(
                    call_sync, GateServiceStub(sync_channel).GetGate, GetGateRequest(), timeout_s=5, retry_s=30
                )
            )
            done, _ = await asyncio.wait([waiting, waiting_sync], timeout=0.5)
            assert not done
            server, _ = await serve(gate, address)
            # A channel that kept gRPC's default back-off would need much longer.
            await asyncio.wait_for(asyncio.gather(waiting, waiting_sync), 5)
    await server.stop(0)


async def test_retries_do_not_repeat_what_the_service_refuses(gate: Gate, stub: Any) -> None:
    gate.failure = errors.LedgerError("SF-LEDGER-STALE", "generation 1 is not 2")
    async with asyncio.timeout(5):
        with pytest.raises(errors.LedgerError):
            await call(stub.GetGate, GetGateRequest(), timeout_s=5, retry_s=math.inf)


async def test_stop_lets_running_calls_finish(gate: Gate) -> None:
    server, port = await serve(gate)
    async with connect(f"127.0.0.1:{port}") as channel:
        running = asyncio.create_task(
            call(GateServiceStub(channel).GetGate, GetGateRequest(gate_id="wait"), timeout_s=10)  # type: ignore[arg-type]
        )
        await gate.entered.wait()
        stopping = asyncio.create_task(server.stop(10))
        await asyncio.sleep(0)
        gate.release.set()
        assert (await running).status.gate_id == "wait"
        await stopping
