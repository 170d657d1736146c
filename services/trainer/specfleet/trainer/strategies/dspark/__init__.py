"""The DSpark strategy: cross entropy, distance to the teacher, and a confidence that learns the acceptance."""

from specfleet.trainer.strategies.dspark.strategy import DSparkStrategy, build_dspark

__all__ = ["DSparkStrategy", "build_dspark"]
