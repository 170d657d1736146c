"""Reads single tensors of a Hugging Face checkpoint: the input embedding and the output head. No transformers.

Some targets scale between the final norm and the logits (muP and its relatives). The project's final state is the tensor
*before* that scale and the teacher's head carries it (`load_head`), so that it is applied exactly once.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from specfleet.contracts.errors import DataError
from specfleet.target.text_config import logits_scale, text_config_of

# Last parts of the names under which the architectures of the field store these two matrices.
_EMBEDDING_NAMES = (
    "embed_tokens.weight",
    "wte.weight",
    "word_embeddings.weight",
    "embed_in.weight",
    "tok_embeddings.weight",
)
_HEAD_NAMES = ("lm_head.weight", "embed_out.weight", "output.weight")


def read_text_config(path: str | Path) -> dict[str, Any]:
    """config.json of a checkpoint; for multimodal targets the text model's section (`text_config_of`).

    Raises DataError SF-TARGET-MISSING or SF-TARGET-CONFIG.
    """
    file = Path(path) / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DataError(
            "SF-TARGET-MISSING", f"{file} does not exist: model.target must be a model directory"
        ) from error
    except (OSError, ValueError) as error:
        raise DataError("SF-TARGET-CONFIG", f"{file} cannot be read: {error}") from error
    return text_config_of(config, Path(path))


def load_embedding(path: str | Path) -> torch.Tensor:
    """Input embedding [V, H] in its stored dtype, on the CPU. Rows beyond the vocabulary (padding) are kept.

    Raises DataError SF-TARGET-MISSING, SF-TARGET-WEIGHTS or SF-TARGET-TENSOR.
    """
    files = tensor_files(Path(path))
    return _load(files, _pick(files, _EMBEDDING_NAMES, "input embedding", path), path)


def load_head(path: str | Path) -> torch.Tensor:
    """Output head [V, H] on the CPU, with the target's logits scale folded in: logits = head · final state.

    The embedding when the checkpoint ties the two. In its stored dtype, or fp32 when there is a scale to fold.
    Raises DataError SF-TARGET-MISSING, SF-TARGET-WEIGHTS, SF-TARGET-TENSOR or SF-TARGET-LOGITS.
    """
    scale = logits_scale(read_text_config(path))
    head = load_raw_head(path)
    return head if scale == 1.0 else head.float() * scale


def load_raw_head(path: str | Path) -> torch.Tensor:
    """Output head [V, H] as stored, on the CPU: what a serving engine multiplies a draft's state with.

    Raises DataError SF-TARGET-MISSING, SF-TARGET-WEIGHTS or SF-TARGET-TENSOR.
    """
    files = tensor_files(Path(path))
    if not any(_matches(name, _HEAD_NAMES) for name in files):
        tied = read_text_config(path).get("tie_word_embeddings", True)
        if not tied:
            raise DataError(
                "SF-TARGET-TENSOR",
                f"{path} holds no output head ({', '.join(_HEAD_NAMES)}) and its config says tie_word_embeddings: false; "
                "the checkpoint is incomplete",
            )
        return load_embedding(path)
    return _load(files, _pick(files, _HEAD_NAMES, "output head", path), path)


def _matches(name: str, endings: tuple[str, ...]) -> bool:
    return any(name == ending or name.endswith("." + ending) for ending in endings)


def is_vocabulary_tensor(name: str) -> bool:
    """Whether a tensor may be the input embedding or the output head."""
    return _matches(name, (*_EMBEDDING_NAMES, *_HEAD_NAMES))


def tensor_files(path: Path) -> dict[str, Path]:
    """Tensor name → safetensors file holding it."""
    if not path.is_dir():
        raise DataError("SF-TARGET-MISSING", f"{path} is not a directory: model.target must be a model directory")
    index = path / "model.safetensors.index.json"
    if index.is_file():
        return {name: path / file for name, file in json.loads(index.read_text(encoding="utf-8"))["weight_map"].items()}
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise DataError(
            "SF-TARGET-WEIGHTS", f"{path} holds no *.safetensors file; convert the checkpoint to safetensors"
        )
    found: dict[str, Path] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                found.update(dict.fromkeys(tensors.keys(), file))
        except Exception as error:  # safetensors raises its own untyped error for truncated or foreign files
            raise DataError("SF-TARGET-WEIGHTS", f"{file} is not a readable safetensors file: {error}") from error
    return found


def _pick(files: dict[str, Path], endings: tuple[str, ...], what: str, path: str | Path) -> str:
    """The one tensor with such a name. Text models nest deepest in `model`/`language_model`, never in a vision tower."""
    names = [name for name in files if _matches(name, endings) and "visual" not in name and "vision" not in name]
    if not names:
        shown = ", ".join(sorted(files)[:5])
        raise DataError(
            "SF-TARGET-TENSOR",
            f"{path} holds no {what}: none of its {len(files)} tensors ends in {', '.join(endings)} (it has {shown}, …)",
        )
    return min(names, key=len)


def _load(files: dict[str, Path], name: str, path: str | Path) -> torch.Tensor:
    try:
        with safe_open(files[name], framework="pt") as tensors:
            tensor = tensors.get_tensor(name)
    except Exception as error:  # safetensors raises its own untyped error for truncated or foreign files
        raise DataError(
            "SF-TARGET-WEIGHTS", f"tensor {name} of {path} cannot be read from {files[name]}: {error}"
        ) from error
    if tensor.dim() != 2:
        raise DataError("SF-TARGET-TENSOR", f"tensor {name} of {path} has shape {list(tensor.shape)}, expected [V, H]")
    return tensor
