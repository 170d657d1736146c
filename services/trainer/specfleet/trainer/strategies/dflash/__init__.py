"""The DFlash strategy (arXiv 2602.06036), with D-PACE and its two ablations as losses."""

from specfleet.trainer.strategies.dflash.strategy import DFlashStrategy, build_dflash

__all__ = ["DFlashStrategy", "build_dflash"]
