"""Prompt sets as the command line makes them. Imports the data room, and with it transformers, only when rendering."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specfleet.config import RunConfig
from specfleet.contracts.errors import ConfigError

if TYPE_CHECKING:
    from specfleet.data.prompt_set import PromptSet


def prepare_run_set(config: RunConfig, out_root: Path) -> "PromptSet":
    """The training set of a run: data.train, filtered and cut as the data section says."""
    from specfleet.data.prepare import PrepareOptions, prepare_prompt_set

    model = config.model
    options = PrepareOptions.from_section(config.data)
    return prepare_prompt_set(config.data.train, model.target, out_root, options, model.trust_remote_code)


def prepare_eval_set(config: RunConfig, files: Sequence[str], out_root: Path | None = None) -> str:
    """The held-out set: the given files, or gate.eval with gate.eval_filter. Answers are not cut. Returns its directory.

    Raises ConfigError SF-CONFIG-NO-EVAL when there is neither.
    """
    from specfleet.data.prepare import PrepareOptions, prepare_prompt_set

    sources = list(files) or config.gate.eval
    if not sources:
        raise ConfigError(
            "SF-CONFIG-NO-EVAL",
            "nothing to evaluate on: gate.eval is empty; name held-out conversations with --eval FILE",
        )
    options = PrepareOptions(max_length=config.data.max_length, keep={} if files else dict(config.gate.eval_filter))
    folder = out_root or Path(config.deployment.output_dir) / "prompt-sets"
    prompt_set = prepare_prompt_set(sources, config.model.target, folder, options, config.model.trust_remote_code)
    return str(prompt_set.path)


def prepare_files(
    files: Sequence[str],
    target: str,
    out_root: Path,
    *,
    max_length: int,
    max_response_tokens: int,
    max_samples: int,
    where: dict[str, list[str]],
) -> "PromptSet":
    from specfleet.data.prepare import PrepareOptions, prepare_prompt_set

    return prepare_prompt_set(
        files, target, out_root, PrepareOptions(max_length, max_response_tokens, max_samples, where)
    )


def describe(prompt_set: "PromptSet") -> dict[str, Any]:
    """What a person wants to know about a set."""
    manifest = prompt_set.manifest
    return {
        "path": str(prompt_set.path),
        "digest": prompt_set.digest,
        "prompts": len(prompt_set),
        "counts": manifest.get("counts", {}),
        "rejects": manifest.get("rejects", {}),
    }
