"""Recording a feature set: what is asked of the coordinator, whether it fits on the disk, how far it is, what came of it."""

import hashlib
import re
import shutil
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from specfleet.config import load_config
from specfleet.contracts.capture import bytes_per_token
from specfleet.contracts.errors import ConfigError, HostError
from specfleet.contracts.states import TERMINAL_RUN_STATES, TaskState
from specfleet.ctl.output import human_bytes, human_rate
from specfleet.ctl.progress import Measure
from specfleet.ctl.sets import verify_set
from specfleet.ctl.submission import absolute_paths, submission
from specfleet.ctl.views import in_flight
from specfleet.data.prompt_set import PromptSet
from specfleet.features.feature_set import FeatureSet
from specfleet.features.manifest import is_feature_set, read_manifest
from specfleet.features.writer import check_same, check_vacant
from specfleet.wire.run_pb2 import RunSnapshot, SubmitRunRequest

# Left free beside the set: the manifest, its successor, and whoever else writes to the disk.
SPARE_BYTES = 64 << 20


def build_recording(
    recipe: Path,
    overrides: list[str],
    directory: Path,
    shard_bytes: int,
    runs: Iterable[RunSnapshot],
    report: Callable[[str], None],
) -> SubmitRunRequest | None:
    """The run that records what `directory` lacks; None when it is complete. runs: those the coordinator knows.

    An unfinished run for this directory is the one to go on with; otherwise it is a new one.

    Raises ConfigError or DataError for what the user can correct, SF-FEATURES-OTHER when the directory holds something else;
    HostError SF-HOST-SPACE when the rest of the set does not fit.
    """
    config = absolute_paths(load_config(recipe, overrides))
    begun = is_feature_set(directory)
    if not begun:
        check_vacant(directory)
    if config.data.source != "prompts":
        raise ConfigError(
            "SF-RECORD-SOURCE", f"{recipe}: data.source is {config.data.source!r}; recording needs prompts"
        )
    if config.trainer.world > 1:
        report(f"trainer.world {config.trainer.world} is for training: one rank records")
    run_id = _run_id(directory, runs)
    config = config.to_record(str(directory), shard_bytes).model_copy(update={"run_id": run_id})
    request = submission(config, report=report)
    prompts = PromptSet.open(request.prompt_set_uri)
    missing = np.ones(len(prompts), dtype=np.bool_)
    if begun:
        found = FeatureSet.open(directory)
        check_same(found, request.contract, prompts)
        if found.manifest.complete:
            return None
        missing = found.num_tokens == 0
        report(f"{directory} has {found.manifest.rows:,} of {len(prompts):,} prompts; going on")
    tokens = int(prompts.num_tokens[missing].sum(dtype=np.int64))
    _check_space(directory, tokens, bytes_per_token(request.contract))
    return request


def _run_id(directory: Path, runs: Iterable[RunSnapshot]) -> str:
    """`capture-NAME-HASH-N`: the same for the same directory, with N rising from run to run."""
    name = re.sub(r"[^a-z0-9]+", "-", directory.name.lower()).strip("-")[:32]
    stem = f"capture-{name}-{hashlib.sha256(str(directory).encode()).hexdigest()[:8]}"
    over = {run.run_id: run.state in TERMINAL_RUN_STATES for run in runs}
    number = 1
    while over.get(f"{stem}-{number}", False):
        number += 1
    return f"{stem}-{number}"


def _check_space(directory: Path, tokens: int, token_bytes: int) -> None:
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    needed, free = tokens * token_bytes + SPARE_BYTES, shutil.disk_usage(existing).free
    if needed > free:
        raise HostError(
            "SF-HOST-SPACE",
            f"{tokens:,} tokens × {token_bytes:,} bytes (and {human_bytes(SPARE_BYTES)} spare) need {human_bytes(needed)}; "
            f"{human_bytes(free)} are free at {existing}. Choose another --out, capture fewer layers (-s strategy.layers=[…]) "
            "or fewer prompts (-s data.max_samples=N)",
        )


def recording(run: RunSnapshot) -> Measure:
    """Prompts done, and as numbers: bytes recorded, capture rate, bytes in flight, dead prompts, and the time left."""
    count = run.tasks.get
    recorded = count(TaskState.TRAINED, 0) + count(TaskState.SETTLED, 0)
    dead = count(TaskState.DEAD, 0)
    done = recorded + dead + count(TaskState.SKIPPED, 0)
    parts = [
        f"{human_bytes(run.metrics.get('recorded_bytes', 0))} recorded",
        f"capture {human_rate(run.capture_rate)}",
        f"in flight {in_flight(run)}",
    ]
    if dead:
        parts.append(f"{dead} dead")
    if recorded and run.capture_rate > 0 and done < run.num_prompts:
        left_s = (run.num_prompts - done) * run.trained_tokens / recorded / run.capture_rate
        parts.append(f"{timedelta(seconds=round(left_s))} left")
    return Measure("prompt", done, run.num_prompts, " · ".join(parts))


def conclusion(directory: Path) -> tuple[dict[str, Any], list[str]]:
    """(what the set holds, what is wrong with it), after reading all of it."""
    _, facts, problems = verify_set(directory)
    dead = read_manifest(directory)[0].dead
    return facts | {"dead": {str(index): reason for index, reason in sorted(dead.items())}}, problems
