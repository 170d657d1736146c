"""The language model's part of a target's config.json, completed, and the scale of its logits. Imports no torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specfleet.contracts.errors import DataError

# A section without one of these relies on the defaults of its configuration class.
_INDISPENSABLE = ("hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads")
_INHERITED = ("tie_word_embeddings", "torch_dtype", "dtype")


def text_config_of(config: dict[str, Any], directory: Path) -> dict[str, Any]:
    """config: config.json of `directory`. For multimodal targets the text model's section, else the whole document.

    Sections often leave out what equals the default of their configuration class (Gemma 3's state neither the vocabulary nor
    the heads). Then transformers fills in the rest, where it knows the architecture. A whole document is taken at its word.
    """
    text = config.get("text_config")
    if not isinstance(text, dict):
        return config
    inherited = {key: config[key] for key in _INHERITED if key in config and key not in text}
    if not all(key in text for key in _INDISPENSABLE):
        text = {**text, **_with_defaults(config, directory)}
    return {**text, **inherited}


def _with_defaults(config: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """The same section as its configuration class sees it; {} when there is none, and readers name what they miss."""
    if "model_type" not in config:
        return {}
    try:
        from transformers import AutoConfig

        whole = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception:  # untyped: an unknown architecture, code of its own, values its class refuses, no transformers
        return {}
    return dict(whole.get_text_config().to_dict())


def logits_scale(text_config: Mapping[str, Any]) -> float:
    """The factor between head · (post-norm state) and the target's logits.

    Granite divides logits by `logits_scaling`, Cohere multiplies by `logit_scale`, Falcon-H1 by `lm_head_multiplier`, MiniCPM
    divides states by hidden_size / `dim_model_base`. Raises DataError SF-TARGET-LOGITS for capped logits, which no factor
    reproduces.
    """
    if text_config.get("final_logit_softcapping"):
        raise DataError(
            "SF-TARGET-LOGITS",
            f"the target caps its logits (final_logit_softcapping {text_config['final_logit_softcapping']}), so they cannot be "
            "recomputed as head · state; such targets are not supported",
        )
    scale = float(text_config.get("logit_scale") or 1.0) * float(text_config.get("lm_head_multiplier") or 1.0)
    scale /= float(text_config.get("logits_scaling") or 1.0)
    if text_config.get("dim_model_base"):
        scale *= float(text_config["dim_model_base"]) / float(text_config["hidden_size"])
    return scale
