"""One Mooncake client with its registered memory.

A broken connection is never repaired but replaced as a whole: its memory may still be written to by a transfer that
timed out, and the shared-memory client of 0.3.13 never recovers from an owner that restarts faster than its ping.
"""

import ctypes
import mmap
import os
import socket
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from specfleet.contracts.errors import HostError, StoreError
from specfleet.store.arena import Arena
from specfleet.store.base import PageLock
from specfleet.store.tensors import Block, Bytes

# Result codes of Mooncake 0.3.13 that mean something to us; every other negative one is infrastructure.
NO_ROOM = -200
INVALID = -600
NOT_READY = -703
ABSENT = -704
LEASE_EXPIRED = -707

# Mooncake's own settings, unless the operator chose others; it reads them when it is imported or set up.
_ENVIRONMENT = {
    # INFO tells of every transfer.
    "MC_LOG_LEVEL": "ERROR",
    # Set-up holds Python's global lock while it retries: by default 20 times, 90 s in which the whole process stands still
    # (0.3.13). We try again ourselves.
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",
    # A master that hangs; the default of 30 s is longer than most leases.
    "MC_RPC_TIMEOUT_MS": "5000",
}
_CONNECT_TIMEOUT_S = 2.0
# madvise advice (Linux): free the pages behind a shared mapping.
_MADV_REMOVE = 9


def load_library() -> ModuleType:
    """Imports mooncake.store; raises HostError that says what the machine lacks."""
    for variable, value in _ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    try:
        import mooncake.store
    except ModuleNotFoundError as error:
        raise HostError(
            "SF-HOST-MOONCAKE",
            "Mooncake is not installed: pip install 'specfleet[mooncake-cpu]' on a host without a GPU, "
            "'specfleet[mooncake]' on one with CUDA 12",
        ) from error
    except ImportError as error:
        raise _library_error(str(error)) from error
    library: ModuleType = mooncake.store
    return library


def _library_error(message: str) -> HostError:
    if "libibverbs" in message:
        return HostError(
            "SF-HOST-LIBIBVERBS",
            f"Mooncake needs the system library libibverbs ({message}): apt-get install libibverbs1",
        )
    return HostError(
        "SF-HOST-MOONCAKE",
        f"Mooncake is installed but does not load ({message}). A missing libcudart means the CUDA wheel on a host "
        "without CUDA: install 'specfleet[mooncake-cpu]' instead; libcurl and libnuma are the Debian packages libcurl4 "
        "and libnuma1",
    )


@dataclass(frozen=True)
class Region:
    """A connection's transfer memory: the first part stages copies, the second is lent, with its pages locked."""

    staging_bytes: int
    lent_bytes: int
    page_lock: PageLock | None = None

    @property
    def num_bytes(self) -> int:
        return self.staging_bytes + self.lent_bytes


class Connection:
    """A set-up client and its region, part of which it lends as views that callers keep."""

    def __init__(self, client: Any, base: int, region: Region, memory: mmap.mmap | None) -> None:
        self.client = client
        self.retired = False
        self.staging = Arena(base, region.staging_bytes)
        self.views = Arena(base + region.staging_bytes, region.lent_bytes)
        unlock = region.page_lock(self.views.base, self.views.size) if region.page_lock else None
        # Runs when the last user (store, call in flight or lent view) is gone, or at interpreter exit.
        self._shut = weakref.finalize(self, _shut, client, base, region.num_bytes, memory, unlock)

    def lend(self, num_bytes: int) -> Bytes | None:
        """Registered memory as a writable uint8 array that returns by itself; None when none is free now.

        The array and every tensor on it keep the region mapped, also after the connection was replaced or closed.
        """
        # Memory of a retired connection may still be written to by a transfer that timed out.
        address = None if self.retired else self.views.try_acquire(num_bytes)
        if address is None:
            return None
        block = Block(address, num_bytes)
        weakref.finalize(block, _give_back, self, address).atexit = False
        return block.bytes()

    def lent(self, address: int, num_bytes: int) -> bool:
        """Whether the bytes lie in memory this connection lent."""
        return self.views.contains(address, num_bytes)

    def close(self) -> None:
        """Ends the client at once when no view is out; otherwise the last view's end does it."""
        if not self.views.in_use() and not self.staging.in_use():
            self._shut()


def _give_back(connection: Connection, address: int) -> None:
    connection.views.release_later(address)


def _shut(client: Any, base: int, size: int, memory: mmap.mmap | None, unlock: Callable[[], None] | None) -> None:
    if unlock is not None:
        unlock()
    client.close()
    if memory is None:
        # Mooncake keeps the shared mapping until the process ends: give back at least the pages.
        ctypes.CDLL(None).madvise(ctypes.c_void_p(base), ctypes.c_size_t(size), _MADV_REMOVE)


def open_connection(
    library: ModuleType, master: str, client_address: str | None, region: Region, probe: str
) -> Connection:
    """Sets up a client: through the owner's shared memory with client_address, over TCP without.

    `probe` is a key that never exists; asking for it proves that the master answers. Raises StoreError.
    """
    local_host = _reach(client_address or master, "segment owner" if client_address else "master")
    client = library.MooncakeDistributedStore()
    # No local buffer: only get() on bytes would use it. No segment: the owner holds the bytes.
    if client_address is not None:
        code = client.setup_dummy(0, 0, client_address)
    else:
        code = client.setup(local_host, "P2PHANDSHAKE", 0, 0, "tcp", "", master)
    if code != 0:
        raise StoreError(
            "SF-STORE-UNREACHABLE", f"Mooncake set-up returned {code} (master {master}, owner {client_address})"
        )
    try:
        code = client.get_size(probe)
        if code != ABSENT:
            raise StoreError("SF-STORE-UNREACHABLE", f"the Mooncake master at {master} does not answer (code {code})")
        return _register(client, region, shared=client_address is not None)
    except BaseException:
        client.close()
        raise


def _register(client: Any, region: Region, shared: bool) -> Connection:
    size, memory = region.num_bytes, None
    if shared:
        # Mooncake populates it.
        base = client.alloc_from_mem_pool(size)
    else:
        # Populated now: first-touch faults would cost 20x in the first transfers.
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)
        base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    code = client.register_buffer(base, size) if base else INVALID
    if code != 0:
        raise StoreError("SF-STORE-REGISTER", f"Mooncake cannot register {size} bytes of transfer memory (code {code})")
    return Connection(client, base, region, memory)


def _reach(address: str, what: str) -> str:
    """This machine's address as seen by the peer. Mooncake's own set-up would freeze the process on a dead one."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_TIMEOUT_S) as link:
            local: str = link.getsockname()[0]
            return local
    except (OSError, ValueError) as error:
        raise StoreError(
            "SF-STORE-UNREACHABLE", f"the Mooncake {what} at {address} cannot be reached: {error}"
        ) from error
