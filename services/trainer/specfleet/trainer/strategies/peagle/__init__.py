"""The P-EAGLE strategy: parallel drafting, trained on sampled chains of depths."""

from specfleet.trainer.strategies.peagle.strategy import PEagleStrategy, build_peagle

__all__ = ["PEagleStrategy", "build_peagle"]
