"""Every engine by name. Adding one means adding a row."""

from collections.abc import Callable
from pathlib import Path

from specfleet.capture.engines.base import Engine
from specfleet.contracts.errors import ConfigError
from specfleet.wire.records_pb2 import CaptureContract

EngineLoader = Callable[[CaptureContract], Engine]
"""Loads the target of a contract. Blocking, seconds to minutes; raises SpecfleetError or whatever the engine raises."""


def engine_loader(engine: str, device: str, bound_target: str) -> EngineLoader:
    """A loader for one worker. `bound_target` overrides the contract's path (the attestation still compares hashes).

    Raises ConfigError SF-CAPTURE-ENGINE for a name that is not in the table.
    """
    loaders = {"hf": _load_hf}
    if engine not in loaders:
        raise ConfigError(
            "SF-CAPTURE-ENGINE", f"capture engine {engine!r} is not available; choose one of: {', '.join(loaders)}"
        )
    return lambda contract: loaders[engine](contract, device, bound_target)


def _load_hf(contract: CaptureContract, device: str, bound_target: str) -> Engine:
    from specfleet.capture.engines.hf import HFEngine  # torch and transformers load only once there is work

    return HFEngine(Path(bound_target or contract.target), contract, device)
