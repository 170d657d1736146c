"""A random Qwen3 to measure with: the speed of a prefill does not depend on what the weights hold."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

# Qwen3-0.6B but for its vocabulary of 151,936, most of which a prefill never touches.
SHAPES: dict[str, dict[str, Any]] = {
    "cuda": dict(
        num_hidden_layers=28, hidden_size=1024, intermediate_size=3072, num_attention_heads=16, num_key_value_heads=8,
        head_dim=128, vocab_size=32_768, max_position_embeddings=8192,
    ),
    "cpu": dict(
        num_hidden_layers=8, hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, vocab_size=512, max_position_embeddings=2048,
    ),
}  # fmt: skip


def random_target(work: Path, device: str, dtype: str) -> Path:
    """The directory of the model, made at the first call."""
    shape = SHAPES[device]
    directory = work / f"qwen3-{shape['num_hidden_layers']}x{shape['hidden_size']}-{dtype}"
    if directory.exists():
        return directory
    partial = directory.with_suffix(".partial")
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen3ForCausalLM(Qwen3Config(**shape, tie_word_embeddings=True)).to(getattr(torch, dtype))
    model.save_pretrained(partial)
    del model
    if device == "cuda":
        torch.cuda.empty_cache()  # for the servers
    words = {f"w{index}": index for index in range(shape["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(partial)
    return partial.rename(directory)
