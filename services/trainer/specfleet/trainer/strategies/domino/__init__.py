"""The Domino strategy: corrected and uncorrected cross entropy, the latter fading out."""

from specfleet.trainer.strategies.domino.strategy import DominoStrategy, build_domino

__all__ = ["DominoStrategy", "build_domino"]
