"""The EAGLE-3 strategy (arXiv 2503.01840): training-time test on captured states."""

from specfleet.trainer.strategies.eagle3.strategy import Eagle3Strategy, build_eagle3

__all__ = ["Eagle3Strategy", "build_eagle3"]
