"""Store URLs → stores. One explicit table; nothing heavy is imported before its scheme is asked for."""

from pathlib import Path
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from specfleet.contracts.errors import ConfigError
from specfleet.store.base import FeatureStore

_FORMS = "mooncake://MASTER:PORT/NAME?client=HOST:PORT&pool=BYTES, file:///DIR?capacity=BYTES or memory://NAME?capacity=BYTES"


def open_store(url: str) -> FeatureStore:
    """Opens the pool a URL names.

    `mooncake://MASTER:PORT/NAME?client=HOST:PORT&pool=BYTES&metrics=HOST:PORT&buffer=BYTES`: client is the segment
    owner's shared-memory service on this host (without it: TCP), metrics the master's HTTP port, pool the capacity to
    report when that cannot be read, buffer this process's transfer memory (default 256 MiB; one object may fill half).
    `file:///DIR?capacity=BYTES`: the name is the last part. `memory://NAME?capacity=BYTES`.

    Raises ConfigError on any other form and HostError when the machine lacks something. A Mooncake pool is reached by
    the first call, so that services may start before it.
    """
    parts = urlsplit(url)
    match parts.scheme:
        case "memory":
            from specfleet.store.memory import DEFAULT_CAPACITY_BYTES, MemoryStore

            options = _options(url, parts, {"capacity"})
            if not parts.netloc or parts.path:
                raise _bad(url, "it needs a name after memory://")
            return MemoryStore(parts.netloc, _bytes(url, options, "capacity") or DEFAULT_CAPACITY_BYTES)
        case "file":
            from specfleet.store.directory import DirectoryStore

            options = _options(url, parts, {"capacity"})
            root = Path(unquote(parts.path))
            if parts.netloc or not root.is_absolute() or not root.name:
                raise _bad(url, "it needs an absolute directory after file://")
            return DirectoryStore(root, _bytes(url, options, "capacity"))
        case "mooncake":
            return _open_mooncake(url, parts)
        case _:
            raise _bad(url, f"unknown scheme {parts.scheme!r}")


def _open_mooncake(url: str, parts: SplitResult) -> FeatureStore:
    from specfleet.store.mooncake import MooncakeStore

    options = _options(url, parts, {"client", "pool", "metrics", "buffer"})
    name = unquote(parts.path.strip("/"))
    if not parts.netloc or not name or "/" in name:
        raise _bad(url, "it needs MASTER:PORT and one NAME")
    return MooncakeStore(
        name,
        master=parts.netloc,
        client=options.get("client"),
        buffer_bytes=_bytes(url, options, "buffer"),
        metrics=options.get("metrics"),
        capacity_bytes=_bytes(url, options, "pool"),
    )


def _options(url: str, parts: SplitResult, known: set[str]) -> dict[str, str]:
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    if unknown := sorted(set(options) - known):
        raise _bad(url, f"unknown option {', '.join(unknown)}; known: {', '.join(sorted(known))}")
    return options


def _bytes(url: str, options: dict[str, str], option: str) -> int | None:
    if option not in options:
        return None
    text = options[option]
    if not text.isdecimal() or int(text) == 0:
        raise _bad(url, f"{option}={text!r} is not a positive number of bytes")
    return int(text)


def _bad(url: str, why: str) -> ConfigError:
    return ConfigError("SF-CONFIG-STORE-URL", f"store URL {url!r}: {why}. Forms: {_FORMS}")
