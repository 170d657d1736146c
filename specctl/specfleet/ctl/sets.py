"""Prompt sets and feature sets on disk, summarised and checked."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from specfleet.contracts.errors import DataError
from specfleet.features.manifest import MANIFEST, PROMPTS, is_feature_set, read_manifest

PROMPT_SET, FEATURE_SET = "prompt set", "feature set"


def stats_of(directory: Path) -> tuple[str, dict[str, Any]]:
    """(what it is, facts). Raises DataError when it is neither."""
    if not _holds_features(directory):
        from specfleet.data.prompt_set import PromptSet
        from specfleet.data.stats import summarize

        return PROMPT_SET, asdict(summarize(PromptSet.open(directory, verify=False)))
    manifest, digest = read_manifest(directory)
    contract = manifest.contract
    return FEATURE_SET, {
        "path": str(directory.resolve()),
        "digest": digest,
        "complete": manifest.complete,
        "target": contract.target,
        "engine": contract.engine,
        "contract_hash": manifest.contract_hash,
        "layers": list(contract.layers),
        "final_state": contract.final_state,
        "extras": list(contract.extras),
        "dtype": contract.dtype,
        "prompt_set": manifest.prompt_set,
        "prompts": manifest.num_prompts,
        "recorded": manifest.rows,
        "dead": len(manifest.dead),
        "tokens": manifest.tokens,
        "bytes": manifest.num_bytes,
        "shards": len(manifest.shards),
    }


def verify_set(directory: Path) -> tuple[str, dict[str, Any], list[str]]:
    """(what it is, facts, what is wrong with it). Raises DataError when not even its index can be read."""
    if not _holds_features(directory):
        from specfleet.data.prompt_set import PromptSet

        found = PromptSet.open(directory)
        return PROMPT_SET, {"path": str(found.path), "digest": found.digest, "prompts": len(found)}, []
    from specfleet.features.verify import verify

    facts = asdict(verify(directory))
    problems = facts.pop("problems")
    if facts["num_problems"] > len(problems):
        problems.append(f"… and {facts['num_problems'] - len(problems)} more")
    return FEATURE_SET, facts, problems


def _holds_features(directory: Path) -> bool:
    """Whether it is a feature set, be its manifest broken. Raises DataError SF-DATA-NO-SET when it is no set at all."""
    holds_prompts = (directory / PROMPTS).is_dir()
    if not holds_prompts and not (directory / MANIFEST).exists():
        raise DataError(
            "SF-DATA-NO-SET",
            f"{directory} is neither a prompt set nor a feature set: it has no {MANIFEST}. "
            "Sets are made by specctl data prepare and specctl data capture",
        )
    return holds_prompts or is_feature_set(directory)
