"""Errors over gRPC: a SpecfleetError becomes a rich status on the server and the same error again on the client.

The status carries google.rpc.ErrorInfo: reason = the error's code, domain "specfleet", metadata exit_code and type.
"""

import re
from typing import cast

import grpc
from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from specfleet.contracts import errors
from specfleet.contracts.errors import HostError, SpecfleetError, UnreachableError

DOMAIN = "specfleet"
INTERNAL_CODE = "SF-RPC-INTERNAL"
# A status travels in HTTP/2 trailers, twice, percent-encoded (up to 12 bytes a character); clients accept
# METADATA_LIMIT_BYTES. A longer text would replace the error by RESOURCE_EXHAUSTED.
MAX_MESSAGE_CHARACTERS = 4000
METADATA_LIMIT_BYTES = 128 * 1024

# Nearest listed base class wins.
_STATUS: dict[type[SpecfleetError], int] = {
    errors.ConfigError: code_pb2.INVALID_ARGUMENT,
    errors.DataError: code_pb2.INVALID_ARGUMENT,
    errors.ContractError: code_pb2.FAILED_PRECONDITION,
    errors.UnreachableError: code_pb2.UNAVAILABLE,
    errors.StoreFullError: code_pb2.RESOURCE_EXHAUSTED,
    errors.FeatureLostError: code_pb2.NOT_FOUND,
    errors.SpecfleetError: code_pb2.FAILED_PRECONDITION,
}
_TYPES: dict[str, type[SpecfleetError]] = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, SpecfleetError)
}
# For peers whose error class this version does not know.
_TYPE_OF_EXIT_CODE: dict[int, type[SpecfleetError]] = {
    errors.EXIT_FAILED: errors.SpecfleetError,
    errors.EXIT_BAD_INPUT: errors.ConfigError,
    errors.EXIT_ENVIRONMENT: errors.HostError,
    errors.EXIT_GATE_FAILED: errors.GateError,
}
_NOT_ANSWERING = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
_PEER = re.compile(r"(?:ipv4:|ipv6:|resolution failed for )(\S+?)[:,;]?(?=\s|$)")


def to_status(error: SpecfleetError) -> status_pb2.Status:
    """The rich status of an error. NOT_FOUND for codes that end in -NOT-FOUND, else by class."""
    if error.code.endswith("-NOT-FOUND"):
        code = code_pb2.NOT_FOUND
    else:
        code = next(_STATUS[kind] for kind in type(error).__mro__ if kind in _STATUS)
    return make_status(code, error.code, error.message, error.exit_code, type(error).__name__)


def make_status(code: int, reason: str, message: str, exit_code: int, type_name: str) -> status_pb2.Status:
    if len(message) > MAX_MESSAGE_CHARACTERS:
        message = f"{message[:MAX_MESSAGE_CHARACTERS]}… ({len(message) - MAX_MESSAGE_CHARACTERS} more characters)"
    info = error_details_pb2.ErrorInfo(
        reason=reason, domain=DOMAIN, metadata={"exit_code": str(exit_code), "type": type_name}
    )
    detail = any_pb2.Any()
    detail.Pack(info)
    return status_pb2.Status(code=code, message=message, details=[detail])


def from_rpc(error: grpc.RpcError, address: str = "") -> SpecfleetError:
    """The SpecfleetError behind a failed call (sync or aio): class, code and message as they were raised on the server.

    No answer (UNAVAILABLE, DEADLINE_EXCEEDED) → UnreachableError SF-HOST-UNREACHABLE in one line, naming the address:
    the given one, else the peer that gRPC names. Any other status without details → SpecfleetError SF-RPC-<STATUS>.
    """
    rich = rpc_status.from_call(cast(grpc.Call, error))
    for detail in rich.details if rich is not None else ():
        info = error_details_pb2.ErrorInfo()
        if detail.Is(info.DESCRIPTOR) and detail.Unpack(info) and info.domain == DOMAIN:
            return _restore(info, rich.message)
    status: grpc.StatusCode = error.code()
    details = " ".join((error.details() or "").split())
    if status in _NOT_ANSWERING:
        return _unreachable(status, details, address)
    return SpecfleetError(f"SF-RPC-{status.name.replace('_', '-')}", details or status.name)


def _restore(info: error_details_pb2.ErrorInfo, message: str) -> SpecfleetError:
    exit_code = int(info.metadata.get("exit_code", errors.EXIT_FAILED))
    kind = _TYPES.get(info.metadata.get("type", "")) or _TYPE_OF_EXIT_CODE.get(exit_code, SpecfleetError)
    restored = kind(info.reason, message)
    if kind.exit_code != exit_code:
        restored.exit_code = exit_code
    return restored


def _unreachable(status: grpc.StatusCode, details: str, address: str) -> UnreachableError:
    match = _PEER.search(details)
    where = address or (match[1] if match else "the service")
    # gRPC nests its reasons; the innermost one is what a person can act on.
    why = details.rsplit(": ", 1)[-1].removesuffix("]") or status.name
    if status is grpc.StatusCode.DEADLINE_EXCEEDED:
        why = "no answer within the deadline"
    return UnreachableError("SF-HOST-UNREACHABLE", f"{where} does not answer ({why}); is the service running there?")


def port_in_use(address: object) -> HostError:
    return HostError(
        "SF-HOST-PORT-IN-USE",
        f"{address} is in use by another process; stop it, or choose another --listen address (port 0: any free one)",
    )
