"""A target that a CPU can serve through interpreted kernels: random and narrow, with the vocabulary of a real one."""

import shutil
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

# Layers enough for the five that DFlash reads.
SIZES = {
    "num_hidden_layers": 8, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1,
    # Far above the usual 0.02, so that logits differ clearly and greedy text varies.
    "initializer_range": 0.2,
}  # fmt: skip


def tiny_target(target: Path, out: Path) -> Path:
    """The same tokenizer and architecture, with random weights; always the same for the same target."""
    if not (out / "config.json").exists():
        out.mkdir(parents=True, exist_ok=True)
        for path in target.iterdir():
            if path.is_file() and "safetensors" not in path.name:
                shutil.copy(path, out)
        config = AutoConfig.from_pretrained(
            target, head_dim=SIZES["hidden_size"] // SIZES["num_attention_heads"], **SIZES
        )
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
        model.to(torch.bfloat16).save_pretrained(out)
    return out
