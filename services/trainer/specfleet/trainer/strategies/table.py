"""The one table of training strategies."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from specfleet.config.models import RunConfig
from specfleet.trainer.strategies.base import Strategy
from specfleet.trainer.strategies.dflash import build_dflash
from specfleet.trainer.strategies.domino import build_domino
from specfleet.trainer.strategies.dspark import build_dspark
from specfleet.trainer.strategies.eagle3 import build_eagle3
from specfleet.trainer.strategies.peagle import build_peagle
from specfleet.wire.records_pb2 import CaptureContract

if TYPE_CHECKING:
    from specfleet.data.prompt_set import PromptSet

Builder = Callable[[RunConfig, CaptureContract, Path, "PromptSet", int, torch.device, torch.dtype], Strategy]

STRATEGIES: dict[str, Builder] = {
    "eagle3": build_eagle3,
    "peagle": build_peagle,
    "dflash": build_dflash,
    "domino": build_domino,
    "dspark": build_dspark,
}


def build_strategy(
    config: RunConfig,
    contract: CaptureContract,
    target_dir: Path,
    prompt_set: "PromptSet",
    total_steps: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Strategy:
    """The strategy a run names, its draft freshly initialised. total_steps: the optimizer steps of the whole run."""
    return STRATEGIES[config.strategy.name](config, contract, target_dir, prompt_set, total_steps, device, dtype)
