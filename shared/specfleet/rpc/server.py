"""A gRPC server as every service runs it: health, reflection, rich errors, one exclusive port."""

from collections.abc import Callable
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from specfleet.rpc.address import listen_address
from specfleet.rpc.errors import METADATA_LIMIT_BYTES, port_in_use
from specfleet.rpc.interceptor import ErrorInterceptor

# References, configurations and reports; a message beyond this is a tensor or a mistake.
MAX_MESSAGE_BYTES = 16 * 1024 * 1024

_OPTIONS: list[tuple[str, Any]] = [
    # Without this a second server on the same port starts silently and both get half of the calls.
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", METADATA_LIMIT_BYTES),
    ("grpc.absolute_max_metadata_size", METADATA_LIMIT_BYTES),
    # Clients ping every 10 s (rpc/client.py); the default allows one ping in 5 minutes and drops who asks more often.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_ping_strikes", 0),
]


class RpcServer:
    """Add servicers, start, stop. Refuses to bind anything but loopback unless insecure."""

    def __init__(self, listen: str, *, insecure: bool = False) -> None:
        self._address = listen_address(listen, insecure=insecure)
        self._added: list[tuple[Callable[[Any, Any], None], Any, str]] = []
        self._health = health.aio.HealthServicer()
        self._server: grpc.aio.Server | None = None

    def add(self, add_to_server: Callable[[Any, Any], None], servicer: Any, full_service_name: str) -> None:
        """add_to_server: the generated add_XServicer_to_server; full_service_name as in specfleet.v1.RunService."""
        self._added.append((add_to_server, servicer, full_service_name))

    async def start(self) -> int:
        """Serves and returns the port. Raises HostError SF-HOST-PORT-IN-USE, naming host:port."""
        server = grpc.aio.server(interceptors=[ErrorInterceptor()], options=_OPTIONS)
        for add_to_server, servicer, _ in self._added:
            add_to_server(servicer, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = [name for _, _, name in self._added]
        reflection.enable_server_reflection([*names, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
        try:
            port = server.add_insecure_port(str(self._address))
        except RuntimeError as error:
            raise port_in_use(self._address) from error
        await server.start()
        self._server = server
        for name in ("", *names):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        return int(port)

    async def stop(self, grace_s: float = 5.0) -> None:
        """Refuses new calls, lets running ones finish for grace_s, then cancels them."""
        if self._server is None:
            return
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)
        self._server = None
