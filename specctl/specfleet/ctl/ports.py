"""Ports of an embedded stack: chosen by the OS once, then held, so that a service always finds its own port after a crash.

A reservation is a socket that is bound with SO_REUSEADDR and never listens. The kernel hands its port to nobody else, neither
to another bind(0) nor as the source port of an outgoing connection, yet a service that sets SO_REUSEADDR (NATS, Mooncake,
gRPC and asyncio all do) may bind and listen on it.
"""

import socket
from collections.abc import Mapping, Sequence

from specfleet.contracts.errors import ConfigError, HostError
from specfleet.ctl.topology import LOOPBACK


def _bind(port: int) -> socket.socket:
    held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((LOOPBACK, port))
    except OSError:
        held.close()
        raise
    return held


class Ports:
    """Numbers for port names, reserved until `close`."""

    def __init__(self, names: Sequence[str], *, wanted: Mapping[str, int], remembered: Mapping[str, int]) -> None:
        """wanted: the user's choice, refused when taken. remembered: the last stack's, replaced when taken.

        Raises ConfigError SF-STACK-PORT-NAME for an unknown name, HostError SF-HOST-PORT for a port that is in use.
        """
        unknown = sorted(set(wanted) - set(names))
        if unknown:
            raise ConfigError(
                "SF-STACK-PORT-NAME", f"no port is named {', '.join(unknown)}; the names are {', '.join(names)}"
            )
        self.numbers: dict[str, int] = {}
        self._held: list[socket.socket] = []
        try:
            # The user's first: an OS-chosen port must not be one of them.
            for name in sorted(names, key=lambda name: (name not in wanted, name not in remembered)):
                self._reserve(name, wanted.get(name), remembered.get(name, 0))
        except BaseException:
            self.close()
            raise

    def _reserve(self, name: str, wanted: int | None, remembered: int) -> None:
        try:
            held = _bind(remembered if wanted is None else wanted)
        except (OSError, OverflowError) as error:
            if wanted is not None:
                raise HostError(
                    "SF-HOST-PORT",
                    f"port {wanted} for {name} cannot be bound on {LOOPBACK} ({error}); "
                    f"stop what uses it, choose another with --port {name}=N, or leave it out and the system chooses",
                ) from error
            held = _bind(0)
        self._held.append(held)
        self.numbers[name] = int(held.getsockname()[1])

    def close(self) -> None:
        for held in self._held:
            held.close()
        self._held.clear()
