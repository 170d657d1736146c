"""Run configuration: one YAML per run, validated here. Imports neither torch nor transformers."""

from specfleet.config.load import dump_config, load_config, parse_config
from specfleet.config.models import RunConfig

__all__ = ["RunConfig", "dump_config", "load_config", "parse_config"]
