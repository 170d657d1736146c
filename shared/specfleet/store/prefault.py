"""Touches every page of a Mooncake pool once, so that the first captures do not pay for it (20x slower puts, measured).

Run by a supervisor after the owner is up: `python -m specfleet.store.prefault mooncake://MASTER:PORT/NAME?client=…`.
Imports no torch.
"""

import secrets
import sys
from urllib.parse import parse_qsl, urlsplit

from specfleet.contracts.errors import SpecfleetError, StoreError
from specfleet.store.connection import ABSENT, NO_ROOM, Region, load_library, open_connection

# Big first, then small ones into what is left.
_SIZES = (16 << 20, 1 << 20)


def prefault(url: str) -> int:
    """Fills the pool's free space, then removes what it wrote. Returns the bytes touched.

    For an idle pool on one machine: while it runs, puts of others are refused as if the pool were full.
    Raises StoreError.
    """
    parts = urlsplit(url)
    name, prefix = parts.path.strip("/"), f".prefault-{secrets.token_hex(4)}"
    library = load_library()
    config = library.ReplicateConfig()
    config.with_hard_pin = True
    client_address = dict(parse_qsl(parts.query)).get("client")
    # What is lent is the source of every write.
    region = Region(staging_bytes=0, lent_bytes=_SIZES[0])
    connection = open_connection(library, parts.netloc, client_address, region, f"{name}/.probe")
    source = connection.lend(_SIZES[0])
    if source is None:
        raise StoreError("SF-STORE-BUFFERS", f"no {_SIZES[0]} bytes of transfer memory")
    source[:] = 0
    keys: list[str] = []
    touched = 0
    try:
        for size in _SIZES:
            code = 0
            while code == 0:
                keys.append(f"{name}/{prefix}/{len(keys)}")
                code = connection.client.batch_put_from([keys[-1]], [source.ctypes.data], [size], config)[0]
                touched += size if code == 0 else 0
            if code != NO_ROOM:
                raise StoreError(
                    "SF-STORE-TRANSFER", f"Mooncake put returned {code} after {touched} bytes of pre-faulting"
                )
    finally:
        codes = connection.client.batch_remove(keys, True)
        del source
        connection.close()
    left = sum(code not in (0, ABSENT) for code in codes)
    if left:
        raise StoreError(
            "SF-STORE-TRANSFER", f"{left} of {len(keys)} pre-faulting objects could not be removed from {name}"
        )
    return touched


if __name__ == "__main__":
    try:
        prefault(sys.argv[1])
    except SpecfleetError as failure:
        print(failure, file=sys.stderr)
        raise SystemExit(failure.exit_code) from None
