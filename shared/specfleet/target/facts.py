"""What the frozen target is: sizes, stop tokens and hashes, read from its directory. Imports no torch."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from specfleet.config.features import feature_request
from specfleet.config.models import RunConfig
from specfleet.contracts.errors import ConfigError
from specfleet.data.cache import sha256_file
from specfleet.data.safetensors import read_header
from specfleet.target.text_config import logits_scale, text_config_of
from specfleet.wire.records_pb2 import CaptureContract

# Everything that decides which ids a text becomes. The first group holds the vocabulary: one of them must be there.
VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json", "tiktoken.model")
_TOKENIZER_FILES = (
    *VOCABULARY_FILES, "merges.txt", "added_tokens.json", "special_tokens_map.json", "tokenizer_config.json",
    "chat_template.jinja", "chat_template.json",
)  # fmt: skip
SAFETENSORS_INDEX = "model.safetensors.index.json"
_SAFETENSORS_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


@dataclass(frozen=True)
class TargetFacts:
    """Facts of one target directory. `config` is config.json as parsed, `text_config` its language model part."""

    path: Path
    architecture: str
    hidden_size: int
    num_hidden_layers: int
    vocab_size: int
    dtype: str
    """As config.json says, else as the weights are stored; float32 where neither is at hand."""
    eos_token_ids: tuple[int, ...]
    """Every id generation stops at: generation_config.json and config.json together, ascending."""
    bos_token_id: int | None
    tie_word_embeddings: bool
    weights_hash: str
    tokenizer_hash: str
    config: dict[str, Any]
    text_config: dict[str, Any]


class FileFacts(NamedTuple):
    size: int
    sha256: str


def read_target_facts(path: str | Path, weights_elsewhere: Mapping[str, FileFacts] | None = None) -> TargetFacts:
    """Reads a Hugging Face directory. weights_elsewhere: by name, of weight files that the directory does not hold.

    Raises ConfigError: SF-TARGET-MISSING (no such directory), SF-TARGET-NOT-A-MODEL (no usable config.json),
    SF-TARGET-NO-WEIGHTS (no weight file, or one that is absent or cut short), SF-TARGET-NO-TOKENIZER.
    """
    directory = _directory(path)
    config, text, generation = _configs(directory)
    weights = [] if weights_elsewhere else weight_files(directory)
    for path in weights:
        if path.suffix == ".safetensors":
            _check_whole(path)
    return TargetFacts(
        path=directory,
        architecture=str((config.get("architectures") or [config.get("model_type", "")])[0]),
        hidden_size=_positive(text, "hidden_size", directory),
        num_hidden_layers=_positive(text, "num_hidden_layers", directory),
        vocab_size=_positive(text, "vocab_size", directory),
        dtype=_dtype(config, text, weights),
        eos_token_ids=_stop_ids(config, text, generation),
        bos_token_id=next(iter(_ids(text.get("bos_token_id", config.get("bos_token_id")))), None),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
        weights_hash=_weights_hash(directory, weights, weights_elsewhere or {}),
        tokenizer_hash=tokenizer_hash(directory),
        config=config,
        text_config=text,
    )


@dataclass(frozen=True)
class TextFacts:
    """What rendering needs to know of a target; its directory may hold no weights."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]


def read_text_facts(path: str | Path) -> TextFacts:
    """Vocabulary size and stop ids. Raises ConfigError SF-TARGET-MISSING, SF-TARGET-NOT-A-MODEL."""
    directory = _directory(path)
    config, text, generation = _configs(directory)
    return TextFacts(_positive(text, "vocab_size", directory), _stop_ids(config, text, generation))


def build_contract(run_config: RunConfig, facts: TargetFacts) -> CaptureContract:
    """What capture must produce for this run on this target. model.target is as `pinned_target` gives it.

    Raises ConfigError SF-CONFIG-LAYERS, DataError SF-TARGET-LOGITS for a target whose logits no head reproduces.
    """
    logits_scale(facts.text_config)
    request = feature_request(run_config.strategy, facts.num_hidden_layers)
    return CaptureContract(
        target=run_config.model.target,
        weights_hash=facts.weights_hash,
        tokenizer_hash=facts.tokenizer_hash,
        layers=request.layers,
        final_state=request.final_state,
        dtype=run_config.model.dtype,
        hidden_size=facts.hidden_size,
        num_hidden_layers=facts.num_hidden_layers,
        vocab_size=facts.vocab_size,
        engine=run_config.capture.engine,
        extras=sorted(set(run_config.capture.extras)),
        trust_remote_code=run_config.model.trust_remote_code,
    )


def tokenizer_hash(path: str | Path) -> str:
    """sha256 (hex) over names and contents of every file that decides tokens and chat format. Needs no weights."""
    directory = _directory(path)
    if not any((directory / name).is_file() for name in VOCABULARY_FILES):
        raise ConfigError(
            "SF-TARGET-NO-TOKENIZER",
            f"{directory} has no tokenizer: none of {', '.join(VOCABULARY_FILES)} is there. Save the "
            "tokenizer beside the weights (tokenizer.save_pretrained)",
        )
    # Model repositories may keep one template per name in a folder.
    templates = sorted(str(p.relative_to(directory)) for p in directory.glob("additional_chat_templates/*.jinja"))
    return _hash_files(
        directory, [name for name in (*_TOKENIZER_FILES, *templates) if (directory / name).is_file()], {}
    )


def weight_files(directory: Path) -> list[Path]:
    """The weight files a loader would read, by name: an index's shards, else model.safetensors, else what there is."""
    single = directory / "model.safetensors"
    for index in (directory / SAFETENSORS_INDEX, directory / "pytorch_model.bin.index.json"):
        if not index.is_file() or (index.name != SAFETENSORS_INDEX and single.is_file()):
            continue
        shards = sorted(set(weight_map(index).values()))
        absent = [name for name in shards if not (directory / name).is_file()]
        if absent or not shards:
            shown = ", ".join(absent[:3]) + (" …" if len(absent) > 3 else "")
            raise ConfigError(
                "SF-TARGET-NO-WEIGHTS",
                f"{index} names {len(shards)} weight files, {len(absent)} are missing: {shown}. Download them again",
            )
        return [directory / name for name in shards]
    if single.is_file():
        return [single]
    for pattern in ("*.safetensors", "pytorch_model*.bin"):
        if found := sorted(directory.glob(pattern)):
            return found
    raise ConfigError(
        "SF-TARGET-NO-WEIGHTS", f"{directory} has a config.json but no *.safetensors or pytorch_model*.bin"
    )


def weight_map(index: Path) -> dict[str, str]:
    """Tensor name → file name, as an index of shards says."""
    return {str(name): str(file) for name, file in dict(_read_json(index).get("weight_map", {})).items()}


def _directory(path: str | Path) -> Path:
    directory = Path(path).expanduser()
    if not directory.exists():
        raise ConfigError(
            "SF-TARGET-MISSING",
            f"target {str(path)!r} does not exist on this machine. Give the directory of a downloaded model "
            "(config.json, *.safetensors, tokenizer.json), or ORG/NAME[@REVISION] of the Hugging Face Hub",
        )
    if not directory.is_dir():
        raise ConfigError(
            "SF-TARGET-NOT-A-MODEL", f"target {directory} is a file; give the directory that holds config.json"
        )
    return directory.resolve()


def _read_config(directory: Path) -> dict[str, Any]:
    if not (directory / "config.json").is_file():
        names = sorted(p.name for p in directory.iterdir())[:5]
        raise ConfigError(
            "SF-TARGET-NOT-A-MODEL",
            f"{directory} has no config.json, so it is not a model (it holds: {', '.join(names) or 'nothing'})",
        )
    return _read_json(directory / "config.json")


def _configs(directory: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """config.json, its language model part, and generation_config.json ({} when absent)."""
    config = _read_config(directory)
    generation = directory / "generation_config.json"
    return config, text_config_of(config, directory), _read_json(generation) if generation.is_file() else {}


def _stop_ids(config: dict[str, Any], text: dict[str, Any], generation: dict[str, Any]) -> tuple[int, ...]:
    return _ids(generation.get("eos_token_id"), text.get("eos_token_id"), config.get("eos_token_id"))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError("SF-TARGET-NOT-A-MODEL", f"{path} is not readable JSON: {error}") from error
    if not isinstance(document, dict):
        raise ConfigError("SF-TARGET-NOT-A-MODEL", f"{path} must hold an object, not {type(document).__name__}")
    return document


def _positive(text: dict[str, Any], key: str, directory: Path) -> int:
    value = text.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(
            "SF-TARGET-NOT-A-MODEL",
            f"{directory / 'config.json'}: {key} is {value!r}; a causal language model needs it",
        )
    return value


def _ids(*values: Any) -> tuple[int, ...]:
    found: set[int] = set()
    for value in values:
        found.update(v for v in (value if isinstance(value, list) else [value]) if isinstance(v, int) and v >= 0)
    return tuple(sorted(found))


def _dtype(config: dict[str, Any], text: dict[str, Any], weights: list[Path]) -> str:
    for part in (config, text):
        for key in ("dtype", "torch_dtype"):
            if part.get(key):
                return str(part[key]).removeprefix("torch.")
    # Old configs do not say: the first floating tensor of the first file does.
    if weights and weights[0].suffix == ".safetensors":
        for tensor in read_header(weights[0])[0].values():
            if name := _SAFETENSORS_DTYPES.get(tensor.get("dtype", "")):
                return name
    return "float32"


def _check_whole(path: Path) -> None:
    """A download that was cut, or a Git LFS pointer in its place, would be found only by the capture workers."""
    try:
        header, start = read_header(path)
        size = start + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise ConfigError(
            "SF-TARGET-NO-WEIGHTS", f"{path} is not a safetensors file ({error}). Download it again (git lfs pull)"
        ) from error
    if path.stat().st_size != size:
        raise ConfigError(
            "SF-TARGET-NO-WEIGHTS",
            f"{path} has {path.stat().st_size:,} bytes, its header says {size:,}. Download it again",
        )


def _weights_hash(directory: Path, weights: list[Path], elsewhere: Mapping[str, FileFacts]) -> str:
    names = ["config.json", *(str(p.relative_to(directory)) for p in weights), *sorted(elsewhere)]
    return _hash_files(directory, names, elsewhere)


def _hash_files(directory: Path, names: list[str], elsewhere: Mapping[str, FileFacts]) -> str:
    digest = hashlib.sha256()
    for name in names:
        facts = elsewhere.get(name) or _file_facts(directory / name)
        digest.update(f"{name}\0{facts.size}\0{facts.sha256}\n".encode())
    return digest.hexdigest()


def _file_facts(path: Path) -> FileFacts:
    return FileFacts(path.stat().st_size, sha256_file(path))
