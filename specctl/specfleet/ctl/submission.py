"""From a run configuration to what the coordinator is asked: resolved paths, a prepared prompt set, a capture contract."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from specfleet.config import RunConfig, dump_config, load_config
from specfleet.config.strategies import Eagle3Section
from specfleet.contracts.errors import DataError
from specfleet.contracts.ids import check_run_id, new_run_id
from specfleet.data.demo import resolve_builtin
from specfleet.target.hub import pinned_target, target_dir, target_facts
from specfleet.wire.run_pb2 import SubmitRunRequest

if TYPE_CHECKING:
    from specfleet.data.prompt_set import PromptSet


def absolute_paths(config: RunConfig) -> RunConfig:
    """Built-in names become paths, local paths absolute, and a target of the Hub is pinned to a commit: the services read
    them from other working directories, and later."""
    target = pinned_target(config.model.target)
    data, strategy, gate, deployment = config.data, config.strategy, config.gate, config.deployment
    return config.model_copy(
        update={
            "model": config.model.model_copy(update={"target": target}),
            "data": data.model_copy(
                update={
                    "train": [_absolute(path) for path in data.train],
                    "prompt_set": _absolute(data.prompt_set) if data.prompt_set else "",
                    "features": _absolute(data.features) if data.features else "",
                }
            ),
            "strategy": strategy.model_copy(
                update={"init_from": _absolute(strategy.init_from) if strategy.init_from else ""}
            ),
            "gate": gate.model_copy(update={"eval": [_absolute(path) for path in gate.eval]}),
            "deployment": deployment.model_copy(update={"output_dir": _absolute(deployment.output_dir)}),
        }
    )


def _absolute(path: str) -> str:
    return str(Path(resolve_builtin(path)).expanduser().resolve())


def build_submission(
    path: Path, overrides: Sequence[str], run_id: str, *, report: Callable[[str], None] = lambda line: None
) -> SubmitRunRequest:
    """Reads and checks the configuration, prepares the prompt set on this machine, and writes the contract.

    Raises ConfigError or DataError (exit code 2) for anything the user can correct.
    """
    config = absolute_paths(load_config(path, overrides))
    run_id = check_run_id(run_id or config.run_id or new_run_id(config.strategy.name))
    return submission(config.model_copy(update={"run_id": run_id}), report=report)


def submission(
    config: RunConfig, *, prompt_sets: Path | None = None, report: Callable[[str], None] = lambda line: None
) -> SubmitRunRequest:
    """The request for a configuration whose paths are absolute and whose run id is set.

    prompt_sets: where a prompt set is written when the configuration names conversations; default: beside the runs.
    """
    from specfleet.target.facts import build_contract

    prompt_set = None
    if config.data.source == "features":
        config, prompt_set = _recorded(config, report)
    contract = build_contract(config, target_facts(config.model.target))
    if not config.records:
        _check_draft(config)
    if prompt_set is None:
        prompt_set = _prepared(config, prompt_sets or Path(config.deployment.output_dir) / "prompt-sets")
    report(f"prompt set {prompt_set.digest[:16]}: {len(prompt_set):,} prompts in {prompt_set.path}")
    return SubmitRunRequest(
        config_yaml=dump_config(config), prompt_set_uri=str(prompt_set.path), contract=contract, run_id=config.run_id
    )


def _check_draft(config: RunConfig) -> None:
    """What the trainer would refuse only once target and fleet are up. Raises DataError SF-INIT-MISSING, ConfigError
    SF-CONFIG-MASK-TOKEN."""
    from specfleet.target.mask_token import resolve_mask_token

    strategy = config.strategy
    if strategy.init_from:
        if not (Path(strategy.init_from) / "config.json").is_file():
            raise DataError(
                "SF-INIT-MISSING",
                f"strategy.init_from: {strategy.init_from} has no config.json, so it is not an exported draft",
            )
    elif not isinstance(strategy, Eagle3Section):
        resolve_mask_token(target_dir(config.model.target, "none"), strategy.mask_token_id)


def _recorded(config: RunConfig, report: Callable[[str], None]) -> "tuple[RunConfig, PromptSet]":
    """The configuration with the engine that captured data.features, and the prompts: the set's own, unless data.prompt_set
    names what should be the same ones (the coordinator compares)."""
    from specfleet.data.prompt_set import PromptSet
    from specfleet.features.feature_set import FeatureSet

    found = FeatureSet.open(config.data.features)
    report(f"feature set {found.digest[:16]}: {found.manifest.rows:,} prompts in {found.path}")
    capture = config.capture.model_copy(update={"engine": found.manifest.contract.engine})
    prompts = PromptSet.open(config.data.prompt_set) if config.data.prompt_set else found.prompts
    return config.model_copy(update={"capture": capture}), prompts


def _prepared(config: RunConfig, out_root: Path) -> "PromptSet":
    from specfleet.data.prompt_set import PromptSet

    if config.data.prompt_set:
        return PromptSet.open(config.data.prompt_set)
    from specfleet.ctl.prompts import prepare_run_set

    return prepare_run_set(config, out_root)
