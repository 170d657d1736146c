"""Starts a draft from an exported one: SGLang, vLLM and SpecForge directories, safetensors or a PyTorch file.

Only what the directory states is compared, since other trainers write sparse configs; but whatever it states must agree,
because a draft with other layers or other heads would train from noise without anybody noticing.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import structlog
import torch
from safetensors import safe_open

from specfleet.contracts.errors import ContractError, DataError
from specfleet.drafts.base import Draft
from specfleet.target.weights import tensor_files

log = structlog.get_logger()

# Wrappers under which trainers save a draft, outermost first or alone.
_PREFIXES = ("module.", "draft_model.", "model.", "logit_head.")
_SIZES = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
    "draft_vocab_size", "target_hidden_size", "fc_norm", "norm_before_residual",
)  # fmt: skip
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
PRODUCER = "specfleet"


def warm_start(draft: Draft, directory: str | Path) -> None:
    """Loads every weight of `directory` into the draft, its vocabulary map included.

    Raises DataError SF-INIT-MISSING (unreadable), ContractError SF-INIT-CONFIG (another architecture, every difference
    listed) or SF-INIT-TENSORS (names or shapes do not fit, every one listed).
    """
    folder = Path(directory).expanduser()
    stated = _read_config(folder)
    try:
        tensors = {_inside(draft.kind, name): tensor for name, tensor in _tensors(folder)}
    except Exception as error:  # safetensors and torch raise untyped errors of their own for foreign files
        raise DataError("SF-INIT-MISSING", f"strategy.init_from: {folder} is not a readable draft: {error}") from error
    _check_config(draft, stated, folder)
    expected = draft.state_dict()
    if "embed_tokens.weight" not in expected:
        tensors.pop("embed_tokens.weight", None)  # such drafts use the target's, which the export may repeat
    _complete_vocabulary(tensors, expected)
    problems = [f"not wanted: {name} {list(tensors[name].shape)}" for name in sorted(tensors.keys() - expected.keys())]
    for name, own in expected.items():
        if name not in tensors:
            problems.append(f"missing: {name} {list(own.shape)}")
        elif tensors[name].shape != own.shape:
            problems.append(f"{name}: {list(tensors[name].shape)}, this run's draft has {list(own.shape)}")
    if problems:
        raise ContractError(
            "SF-INIT-TENSORS",
            f"strategy.init_from: {folder} does not fit this run's {draft.kind} draft ({len(problems)} differences): "
            f"{'; '.join(problems)}",
        )
    draft.load_state_dict({name: tensor.to(expected[name].dtype) for name, tensor in tensors.items()}, strict=True)
    log.info("draft starts from an exported one", directory=str(folder), tensors=len(tensors))


def stated_mask_token(directory: str) -> int | None:
    """The mask token id an exported draft names, None without one. Raises DataError SF-INIT-MISSING; "" is no draft."""
    if not directory:
        return None
    stated = _read_config(Path(directory).expanduser())
    for config in (stated.get("dflash_config") or {}, stated):
        for name in ("mask_token_id", "pard_token", "ptd_token_id"):
            if config.get(name) is not None:
                return int(config[name])
    return None


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(
            "SF-INIT-MISSING", f"strategy.init_from: {folder} has no readable config.json: {error}"
        ) from error
    return config


def _tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    file = folder / "pytorch_model.bin"
    if file.is_file() and not any(folder.glob("*.safetensors")):
        yield from torch.load(file, map_location="cpu", weights_only=True).items()
        return
    names: dict[Path, list[str]] = {}
    for name, path in tensor_files(folder).items():
        names.setdefault(path, []).append(name)
    for path, held in names.items():
        with safe_open(path, framework="pt") as opened:
            for name in held:
                yield name, opened.get_tensor(name)


def _inside(kind: str, name: str) -> str:
    """Stored name → name in the module."""
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    if kind == "eagle3" and name.startswith("layers.0."):
        return "midlayer." + name.removeprefix("layers.0.")
    if kind == "peagle" and name.startswith("midlayer."):
        return "layers.0." + name.removeprefix("midlayer.")
    return name


def _complete_vocabulary(tensors: dict[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Fills in halves of the vocabulary map that engines do not need and some exports leave out.

    Full-vocabulary drafts often carry none at all, or an identity that is useless beside the target's head.
    """
    if "t2d" not in expected:
        tensors.pop("d2t", None)
        tensors.pop("t2d", None)
        return
    size, vocab = len(expected["d2t"]), len(expected["t2d"])
    if "d2t" not in tensors and size == vocab:
        tensors["d2t"] = torch.zeros(size, dtype=torch.int64)
    offsets = tensors.get("d2t")
    if offsets is not None and offsets.shape == (size,) and "t2d" not in tensors:
        chosen = offsets.long() + torch.arange(size)
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, chosen, True)


def _check_config(draft: Draft, stated: Mapping[str, Any], folder: Path) -> None:
    own = draft.config.to_dict()
    wrong = [
        f"{name} {stated[name]!r}, this run's draft has {own[name]!r}"
        for name in _SIZES
        if name in own and stated.get(name) is not None and stated[name] != own[name]
    ]
    layers = _stated_layers(stated)
    if layers is not None and "layer_ids" in own and layers != list(own["layer_ids"]):
        wrong.append(
            f"captured layers {layers} (outputs), this run captures {list(own['layer_ids'])}: set strategy.layers"
        )
    if "num_layers" in own and stated.get("num_hidden_layers") not in (None, own["num_layers"]):
        wrong.append(f"num_hidden_layers {stated['num_hidden_layers']}, this run's draft has {own['num_layers']}")
    mask = stated_mask_token(str(folder))
    if "mask_token_id" in own and mask not in (None, own["mask_token_id"]):
        wrong.append(f"mask token {mask}, this run's draft has {own['mask_token_id']}: set strategy.mask_token_id")
    shift = (stated.get("dflash_config") or {}).get("shift_label")
    if draft.kind == "domino" and shift not in (None, own["sample_from_anchor"]):
        wrong.append(f"shift_label {shift}, this run's draft has {own['sample_from_anchor']}: set strategy.shift_label")
    if "norm_output" in own and not _trained_by_v030(stated) and bool(stated.get("norm_output")) != own["norm_output"]:
        wrong.append(f"norm_output {bool(stated.get('norm_output'))}: set strategy.norm_output to it")
    if wrong:
        raise ContractError(
            "SF-INIT-CONFIG", f"strategy.init_from: {folder} is another architecture: {'; '.join(wrong)}"
        )
    if _trained_by_v030(stated):
        log.warning(
            "this draft may come from SpecForge v0.3.0, whose norm_output had no effect: it was trained with the un-normed "
            "output fed back, although its config (and every engine that serves it) says otherwise. If so, train on with "
            "strategy.norm_output false",
            directory=str(folder),
            norm_output=own.get("norm_output"),
        )
    theta = (stated.get("rope_parameters") or {}).get("rope_theta", stated.get("rope_theta"))
    if theta is not None and "rope_theta" in own and float(theta) != own["rope_theta"]:
        log.warning(
            "draft was trained with another rotary base; it has to adapt first",
            stated=theta,
            own=own["rope_theta"],
            directory=str(folder),
        )


def _trained_by_v030(stated: Mapping[str, Any]) -> bool:
    """EAGLE-3.1 as SpecForge v0.3.0 writes it; exports of this project say who made them."""
    return bool(stated.get("fc_norm")) and bool(stated.get("norm_output")) and stated.get("producer") != PRODUCER


def _stated_layers(stated: Mapping[str, Any]) -> list[int] | None:
    """As "output of layer k", or None when the config leaves the default to the engine."""
    nested = (stated.get("eagle_config") or {}).get(
        _LAYER_IDS, (stated.get("dflash_config") or {}).get("target_layer_ids")
    )
    if nested is not None:
        return list(nested)
    top = stated.get(_LAYER_IDS)
    return None if top is None else [layer - 1 for layer in top]
