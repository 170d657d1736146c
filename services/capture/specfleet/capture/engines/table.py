"""Every engine by name. Adding one means adding a row."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from specfleet.capture.engines.base import Engine
from specfleet.contracts.errors import ConfigError
from specfleet.store.base import FeatureStore
from specfleet.wire.records_pb2 import CaptureContract


@dataclass(frozen=True)
class EngineOptions:
    """What the command line of specfleet-capture says about engines."""

    engine: str
    device: str = "auto"
    target: str = ""
    """The only target this worker serves, a directory or a hub name; empty: what a contract names."""
    store_url: str = ""
    servers: tuple[str, ...] = ()
    """URLs of SGLang servers that run already; none: one is started."""
    sglang_python: str = ""
    sglang_flags: str = ""
    sglang_log: str = ""
    tensor_parallel: int = 1
    memory_fraction: float = 0.0


EngineLoader = Callable[[CaptureContract, FeatureStore], Awaitable[Engine]]
"""Loads the target of a contract, seconds to minutes; raises SpecfleetError or whatever the engine raises.

The store is the worker's own: an engine that stores features itself proves that it writes to the same pool.
"""


def engine_loader(options: EngineOptions) -> EngineLoader:
    """A loader for one worker. Raises ConfigError SF-CAPTURE-ENGINE for a name that is not in the table."""
    loaders = {"hf": _load_hf, "sglang": _load_sglang}
    if options.engine not in loaders:
        raise ConfigError(
            "SF-CAPTURE-ENGINE",
            f"capture engine {options.engine!r} is not available; choose one of: {', '.join(loaders)}",
        )
    if options.servers and options.engine != "sglang":
        raise ConfigError("SF-CAPTURE-ENGINE", f"--server needs --engine sglang, not {options.engine}")
    return lambda contract, store: loaders[options.engine](options, contract, store)


# torch and transformers load only once there is work.


async def _load_hf(options: EngineOptions, contract: CaptureContract, _store: FeatureStore) -> Engine:
    import asyncio

    from specfleet.capture.engines.hf import HFEngine
    from specfleet.target.hub import target_dir

    directory = await asyncio.to_thread(target_dir, options.target or contract.target)
    return await asyncio.to_thread(HFEngine, directory, contract, options.device)


async def _load_sglang(options: EngineOptions, contract: CaptureContract, store: FeatureStore) -> Engine:
    from specfleet.capture.engines.sglang import SGLangEngine

    return await SGLangEngine.load(options, contract, store)
