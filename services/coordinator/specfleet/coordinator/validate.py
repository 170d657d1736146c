"""What a run must satisfy before it is accepted. Every refusal shows the numbers."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from specfleet.bus.base import MAX_MESSAGE_BYTES, MAX_PROMPT_BYTES
from specfleet.config import RunConfig
from specfleet.config.features import feature_request, total_steps
from specfleet.contracts.capture import contract_gaps, feature_table
from specfleet.contracts.errors import ConfigError, ContractError, DataError
from specfleet.features.feature_set import FeatureSet
from specfleet.wire.records_pb2 import CaptureContract

# Token ids below 2^21 take at most 3 bytes as varints, and each token has one byte of loss mask.
_PROMPT_BYTES_PER_TOKEN = 4
_PROMPT_OVERHEAD_BYTES = 1_024
# Key, shape, dtype and checksum of one feature in a SampleRef; ids and times of the reference itself.
_REF_BYTES_PER_FEATURE = 220
_REF_OVERHEAD_BYTES = 300


def check_contract(config: RunConfig, contract: CaptureContract) -> None:
    """Raises ContractError SF-RUN-CONTRACT when the contract is empty or not what the configuration asks for."""
    empty = [
        name
        for name in (
            "target",
            "weights_hash",
            "tokenizer_hash",
            "layers",
            "final_state",
            "dtype",
            "hidden_size",
            "vocab_size",
            "engine",
        )
        if not getattr(contract, name)
    ]
    if empty:
        raise ContractError(
            "SF-RUN-CONTRACT",
            f"the capture contract lacks {', '.join(empty)}; submit with specctl, or build it in full",
        )
    wanted = feature_request(config.strategy, contract.num_hidden_layers)
    pairs = (
        ("layers", list(wanted.layers), list(contract.layers)),
        ("final_state", wanted.final_state, contract.final_state),
        ("dtype", config.model.dtype, contract.dtype),
        ("engine", config.capture.engine, contract.engine),
        ("extras", sorted(config.capture.extras), sorted(contract.extras)),
    )
    different = [f"{name}: configuration {a}, contract {b}" for name, a, b in pairs if a != b]
    if different:
        raise ContractError("SF-RUN-CONTRACT", f"contract and configuration disagree: {'; '.join(different)}")


def check_features(
    config: RunConfig, contract: CaptureContract, found: FeatureSet, digest: str, lengths: npt.NDArray[np.int32]
) -> None:
    """Whether a feature set can serve the run. digest, lengths: of the run's prompt set.

    Raises ContractError SF-RUN-FEATURES-CONTRACT when it was recorded under a contract that does not contain the run's,
    DataError SF-RUN-FEATURES when prompts are missing, differ or are dead in too great a number.
    """
    manifest = found.manifest
    gaps = contract_gaps(manifest.contract, contract)
    if gaps:
        raise ContractError(
            "SF-RUN-FEATURES-CONTRACT",
            f"{found.path} cannot serve this run: {'; '.join(gaps)}. Choose a strategy and target it was recorded for, or "
            "record another set",
        )
    problems = []
    missing = found.missing()
    if len(missing) or not manifest.complete:
        problems.append(
            f"it is not complete: {manifest.rows} of {manifest.num_prompts} prompts are recorded, {len(manifest.dead)} are dead, "
            f"{len(missing)} are missing. Go on recording it"
        )
    if manifest.prompt_set != digest:
        problems.append(f"it was recorded for prompt set {manifest.prompt_set}, the run's is {digest}")
    elif len(differ := np.flatnonzero((found.num_tokens != lengths) & (found.num_tokens > 0))):
        problems.append(f"{len(differ)} prompts have other lengths than in the prompt set, the first is {differ[0]}")
    if len(manifest.dead) > config.flow.max_dead_fraction * manifest.num_prompts:
        problems.append(
            f"{len(manifest.dead)} of {manifest.num_prompts} prompts are dead; flow.max_dead_fraction is "
            f"{config.flow.max_dead_fraction}"
        )
    if problems:
        raise DataError("SF-RUN-FEATURES", f"{found.path} cannot serve this run: {'; '.join(problems)}")


def check_sizes(config: RunConfig, contract: CaptureContract, lengths: npt.NDArray[np.int32]) -> None:
    """Raises DataError or ConfigError when prompts, plans or marks cannot work. lengths: tokens per prompt, [prompts]."""
    if len(lengths) == 0:
        raise DataError("SF-RUN-NO-PROMPTS", "the prompt set holds no prompts")
    steps = total_steps(config, len(lengths))
    if steps == 0:
        raise ConfigError(
            "SF-RUN-NO-STEPS",
            f"flow.tail is drop and {len(lengths)} prompts do not fill one window of {config.global_batch} samples: "
            "nothing would be trained. Lower the batch, add prompts, or use flow.tail: carry",
        )
    longest = int(lengths.max())
    if longest * _PROMPT_BYTES_PER_TOKEN + _PROMPT_OVERHEAD_BYTES > MAX_PROMPT_BYTES:
        raise ConfigError(
            "SF-RUN-PROMPT-TOO-LONG",
            f"the longest prompt has {longest} tokens; a prompt message holds at most {MAX_PROMPT_BYTES} bytes, which is "
            f"{(MAX_PROMPT_BYTES - _PROMPT_OVERHEAD_BYTES) // _PROMPT_BYTES_PER_TOKEN} tokens. Lower data.max_length",
        )
    _check_plan(config, contract)
    _check_retention(config)


def _check_plan(config: RunConfig, contract: CaptureContract) -> None:
    per_rank = -(-config.global_batch // config.trainer.world)
    size = per_rank * (_REF_OVERHEAD_BYTES + _REF_BYTES_PER_FEATURE * len(feature_table(contract)))
    if size > MAX_MESSAGE_BYTES:
        raise ConfigError(
            "SF-RUN-PLAN-TOO-LARGE",
            f"a window of {config.global_batch} samples gives each of {config.trainer.world} ranks {per_rank} references, "
            f"about {size} bytes; a plan holds at most {MAX_MESSAGE_BYTES}. Lower trainer.batch_size × accumulation",
        )


def _check_retention(config: RunConfig) -> None:
    if config.flow.retain != "until_checkpoint":
        return
    need = (config.checkpoint.every_steps + 1) * config.global_batch
    if config.flow.low_samples < need:
        raise ConfigError(
            "SF-RUN-RETENTION",
            f"flow.retain is until_checkpoint: {config.checkpoint.every_steps} steps (checkpoint.every_steps) × "
            f"{config.global_batch} samples are kept until a checkpoint, and one more window must fit: {need} samples, but "
            f"flow.low_samples is {config.flow.low_samples}. Raise flow.low_samples and flow.high_samples, or checkpoint more often",
        )


def largest_window(config: RunConfig, lengths: npt.NDArray[np.int32]) -> int:
    """Tokens of the largest window possible: the global_batch longest prompts; with retention, of all steps kept."""
    windows = config.checkpoint.every_steps + 1 if config.flow.retain == "until_checkpoint" else 1
    size = min(len(lengths), config.global_batch)
    return windows * int(np.partition(lengths, len(lengths) - size)[-size:].sum(dtype=np.int64))


def check_resume(recorded: RunConfig, given: RunConfig) -> None:
    """Raises ContractError SF-RUN-IDENTITY when the draft would be another one, ConfigError SF-RUN-RESUME when the work
    would; both values are shown. Everything else may change on resume."""
    draft = _differences(recorded, given, ["strategy", "model"])
    if draft:
        raise ContractError(
            "SF-RUN-IDENTITY", f"the configuration describes another draft: {'; '.join(draft)}. Submit a new run"
        )
    work = _differences(recorded, given, ["data", "deployment", "record"])
    for name in (
        "trainer.epochs",
        "trainer.max_steps",
        "flow.global_batch",
        "flow.tail",
        "flow.retain",
        "capture.engine",
    ):
        section, key = name.split(".")
        a, b = getattr(getattr(recorded, section), key), getattr(getattr(given, section), key)
        if a != b:
            work.append(f"{name}: recorded {a!r}, now {b!r}")
    if recorded.global_batch != given.global_batch:
        work.append(f"samples per step: recorded {recorded.global_batch}, now {given.global_batch}")
    if work:
        raise ConfigError(
            "SF-RUN-RESUME", f"this cannot change while a run exists: {'; '.join(work)}. Submit a new run"
        )


def _differences(recorded: RunConfig, given: RunConfig, sections: Sequence[str]) -> list[str]:
    found = []
    for section in sections:
        a, b = getattr(recorded, section).model_dump(mode="json"), getattr(given, section).model_dump(mode="json")
        # Two strategies have different keys; what one of them lacks is shown as None.
        keys = [key for key in {**a, **b} if a.get(key) != b.get(key)]
        found += [f"{section}.{key}: recorded {a.get(key)!r}, now {b.get(key)!r}" for key in keys]
    return found
