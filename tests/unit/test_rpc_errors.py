"""Which status each error class becomes, and what remains of a status without details."""

import grpc
import pytest
from google.rpc import code_pb2, error_details_pb2
from grpc.aio import AioRpcError, Metadata

from specfleet.contracts import errors
from specfleet.contracts.errors import SpecfleetError, UnreachableError
from specfleet.rpc.errors import MAX_MESSAGE_CHARACTERS, from_rpc, to_status


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.ConfigError("SF-CONFIG-X", "m"), code_pb2.INVALID_ARGUMENT),
        (errors.DataError("SF-DATA-X", "m"), code_pb2.INVALID_ARGUMENT),
        (errors.ContractError("SF-CONTRACT-X", "m"), code_pb2.FAILED_PRECONDITION),
        (errors.LedgerError("SF-LEDGER-X", "m"), code_pb2.FAILED_PRECONDITION),
        (errors.LedgerError("SF-LEDGER-RUN-NOT-FOUND", "m"), code_pb2.NOT_FOUND),
        (errors.HostError("SF-HOST-X", "m"), code_pb2.FAILED_PRECONDITION),
        (errors.UnreachableError("SF-HOST-UNREACHABLE", "m"), code_pb2.UNAVAILABLE),
        (errors.StoreFullError("SF-STORE-FULL", "m"), code_pb2.RESOURCE_EXHAUSTED),
        (errors.FeatureLostError("SF-STORE-LOST", "m"), code_pb2.NOT_FOUND),
        (errors.GateError("SF-GATE-X", "m"), code_pb2.FAILED_PRECONDITION),
    ],
)
def test_status_by_class(error: SpecfleetError, code: int) -> None:
    status = to_status(error)
    assert (status.code, status.message) == (code, "m")
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert (info.domain, info.reason) == ("specfleet", error.code)
    assert dict(info.metadata) == {"exit_code": str(error.exit_code), "type": type(error).__name__}


def test_long_messages_are_cut_with_a_count() -> None:
    status = to_status(SpecfleetError("SF-X", "é" * (MAX_MESSAGE_CHARACTERS + 7)))
    assert status.message.endswith("é… (7 more characters)")


def _bare(code: grpc.StatusCode, details: str) -> AioRpcError:
    return AioRpcError(code, Metadata(), Metadata(), details=details)


@pytest.mark.parametrize(
    ("details", "where"),
    [
        (
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:7070: Failed to connect to remote host: "
            "Connection refused",
            "127.0.0.1:7070 does not answer (Connection refused)",
        ),
        ("last error: ipv6:[::1]:7070: connect: Connection refused (111)", "[::1]:7070 does not answer"),
        ("DNS resolution failed for nowhere.invalid:70: C-ares status", "nowhere.invalid:70 does not answer"),
        ("Socket closed", "the service does not answer (Socket closed)"),
    ],
)
def test_no_answer_names_the_address_in_one_line(details: str, where: str) -> None:
    error = from_rpc(_bare(grpc.StatusCode.UNAVAILABLE, details))
    assert isinstance(error, UnreachableError)
    assert error.code == "SF-HOST-UNREACHABLE"
    assert error.message.startswith(where)
    assert "\n" not in error.message


def test_the_address_of_the_caller_wins() -> None:
    error = from_rpc(_bare(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"), "host:1")
    assert error.message.startswith("host:1 does not answer (no answer within the deadline)")


def test_other_statuses_keep_their_name() -> None:
    error = from_rpc(_bare(grpc.StatusCode.UNIMPLEMENTED, "Method not found!"))
    assert (type(error), error.code, error.message) == (SpecfleetError, "SF-RPC-UNIMPLEMENTED", "Method not found!")
