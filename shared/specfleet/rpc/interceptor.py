"""Server side of errors: whatever a servicer raises leaves as a rich status, and the unexpected is logged."""

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn

import grpc
import structlog
from google.rpc import code_pb2
from grpc_status import rpc_status

from specfleet.contracts.errors import EXIT_FAILED, SpecfleetError
from specfleet.rpc.errors import INTERNAL_CODE, make_status, to_status

log = structlog.get_logger()


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """SpecfleetError → its rich status; anything else → INTERNAL (SF-RPC-INTERNAL) with a logged traceback."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler: Any = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None:  # unimplemented: gRPC answers by itself
            return None
        arguments = {
            "request_deserializer": handler.request_deserializer,
            "response_serializer": handler.response_serializer,
        }
        if handler.unary_unary and inspect.iscoroutinefunction(handler.unary_unary):
            return grpc.unary_unary_rpc_method_handler(_guard(handler.unary_unary, method), **arguments)
        if handler.stream_unary and inspect.iscoroutinefunction(handler.stream_unary):
            return grpc.stream_unary_rpc_method_handler(_guard(handler.stream_unary, method), **arguments)
        if handler.unary_stream and inspect.isasyncgenfunction(handler.unary_stream):
            return grpc.unary_stream_rpc_method_handler(_guard_stream(handler.unary_stream, method), **arguments)
        if handler.stream_stream and inspect.isasyncgenfunction(handler.stream_stream):
            return grpc.stream_stream_rpc_method_handler(_guard_stream(handler.stream_stream, method), **arguments)
        return handler


def _guard(behaviour: Callable[[Any, Any], Awaitable[Any]], method: str) -> Callable[[Any, Any], Awaitable[Any]]:
    async def guarded(request: Any, context: Any) -> Any:
        try:
            return await behaviour(request, context)
        except (grpc.aio.AbortError, asyncio.CancelledError):
            raise
        except Exception as error:
            await _abort(error, context, method)

    return guarded


def _guard_stream(
    behaviour: Callable[[Any, Any], AsyncIterator[Any]], method: str
) -> Callable[[Any, Any], AsyncIterator[Any]]:
    async def guarded(request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            async for response in behaviour(request, context):
                yield response
        except (grpc.aio.AbortError, asyncio.CancelledError):
            raise
        except Exception as error:
            await _abort(error, context, method)

    return guarded


async def _abort(error: Exception, context: Any, method: str) -> NoReturn:
    if isinstance(error, SpecfleetError):
        log.debug("refused", method=method, code=error.code, reason=error.message)
        status = to_status(error)
    else:
        log.error("call failed unexpectedly", method=method, exc_info=error)
        text = f"{method} failed: {type(error).__name__}: {error}; the traceback is in the service's log"
        status = make_status(code_pb2.INTERNAL, INTERNAL_CODE, text, EXIT_FAILED, SpecfleetError.__name__)
    plain = rpc_status.to_status(status)
    await context.abort(plain.code, plain.details, plain.trailing_metadata)
    raise AssertionError("abort() always raises")
