"""Bus URLs → buses. One explicit table."""

import re

from specfleet.bus.base import Bus
from specfleet.contracts.errors import ConfigError


def open_bus(url: str) -> Bus:
    """`nats://HOST:PORT[,HOST:PORT…][?replicas=N]` or `memory://NAME`; not connected yet.

    Raises ConfigError SF-CONFIG-BUS-URL on any other form.
    """
    scheme, _, rest = url.partition("://")
    if scheme == "memory" and re.fullmatch(r"[A-Za-z0-9_.-]+", rest):
        from specfleet.bus.memory import MemoryBus

        return MemoryBus(rest)
    if scheme == "memory":
        raise ConfigError("SF-CONFIG-BUS-URL", f"{url!r} is not a bus URL; expected memory://NAME")
    from specfleet.bus.jetstream import JetStreamBus

    return JetStreamBus(url)
