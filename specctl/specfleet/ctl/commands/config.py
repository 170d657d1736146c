"""specctl config schema, check."""

from pathlib import Path
from typing import Annotated

import typer

from specfleet.ctl.options import AsJson, Overrides


def schema() -> None:
    """The JSON Schema of a run configuration, for editors."""
    import json

    from specfleet.config import RunConfig

    print(json.dumps(RunConfig.model_json_schema(), indent=2))


def check(
    path: Annotated[Path, typer.Argument(metavar="RUN.yaml")], overrides: Overrides = None, as_json: AsJson = False
) -> None:
    """Validate a run configuration and print it resolved."""
    from specfleet.config import dump_config, load_config
    from specfleet.ctl.output import emit

    config = load_config(path, overrides or [])
    emit(as_json, config.model_dump(mode="json"), lambda out: out.print(dump_config(config), end="", markup=False))
