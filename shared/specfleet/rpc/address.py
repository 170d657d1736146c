"""host:port strings: parsing, and the rule that a service listens on loopback unless told otherwise."""

import ipaddress
from dataclasses import dataclass

from specfleet.contracts.errors import ConfigError


@dataclass(frozen=True)
class Address:
    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """`host:port`, `[ipv6]:port` or `:port` (then 127.0.0.1). Raises ConfigError SF-CONFIG-ADDRESS on anything else."""
    host, colon, port = text.strip().rpartition(":")
    host = host or "127.0.0.1"
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        colon = ""
    if (
        not colon
        or not (port.isascii() and port.isdigit())
        or int(port) > 65535
        or any(c.isspace() or c == "/" for c in host)
    ):
        raise ConfigError(
            "SF-CONFIG-ADDRESS",
            f"{text!r} is not an address; expected host:port with a port from 0 (chosen by the system) to 65535, "
            "as in 127.0.0.1:7070 or [::1]:7070",
        )
    return Address(host, int(port))


def listen_address(text: str, *, insecure: bool = False) -> Address:
    """Where to listen. Raises ConfigError SF-CONFIG-INSECURE-LISTEN for anything but loopback, unless insecure."""
    address = parse_address(text)
    if not address.is_loopback and not insecure:
        raise ConfigError(
            "SF-CONFIG-INSECURE-LISTEN",
            f"refusing to listen on {address}: the connection is neither encrypted nor authenticated. "
            "Listen on 127.0.0.1, or pass --insecure on a private network",
        )
    return address
