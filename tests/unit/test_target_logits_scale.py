"""Targets that scale between the final norm and the logits: the scale is applied exactly once, wherever it is looked for."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.tiny import make_tiny_tokenizer
from transformers import AutoModelForCausalLM, CohereConfig, GraniteConfig, PretrainedConfig

from specfleet.contracts.errors import DataError
from specfleet.target.hf import HFTarget
from specfleet.target.weights import load_head, load_raw_head, logits_scale

SIZES: dict[str, Any] = {
    "vocab_size": 384, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 2, "tie_word_embeddings": True,
    "initializer_range": 0.3,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        (GraniteConfig(logits_scaling=8.0, embedding_multiplier=6.0, **SIZES), 0.125),
        (CohereConfig(logit_scale=0.25, **SIZES), 0.25),
    ],
    ids=["granite", "cohere"],
)
def test_head_times_final_state_is_the_targets_logits(tmp_path: Path, config: PretrainedConfig, scale: float) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(tmp_path)
    make_tiny_tokenizer().save_pretrained(tmp_path)
    text = [5, 80, 200, 33, 9]
    with torch.no_grad():
        expected = model(torch.tensor([text])).logits[0].float()
    target = HFTarget.load(tmp_path, (1,), dtype="float32", extras=("teacher_argmax", "teacher_lse"))
    captured = target.capture([text])[0]
    assert isinstance(captured, dict)
    torch.testing.assert_close(load_head(tmp_path), scale * load_raw_head(tmp_path))
    torch.testing.assert_close(captured["final_state"] @ load_head(tmp_path).T, expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(captured["teacher_lse"], expected.logsumexp(-1), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(target.forward(torch.tensor([text]))[0], expected, atol=1e-5, rtol=1e-4)


def test_scales_by_family() -> None:
    assert logits_scale({"hidden_size": 2304, "dim_model_base": 256}) == pytest.approx(256 / 2304)
    assert logits_scale({"lm_head_multiplier": 0.5}) == 0.5
    assert logits_scale({"logits_scaling": 1.0, "logit_scale": None}) == 1.0


def test_a_scale_inside_text_config_is_found(tiny_target: Path, tmp_path: Path) -> None:
    for file in tiny_target.iterdir():
        if file.suffix == ".safetensors":
            (tmp_path / file.name).symlink_to(file)
    text = json.loads((tiny_target / "config.json").read_text())
    document = {
        "architectures": ["Wrapped"],
        "tie_word_embeddings": True,
        "text_config": {**text, "logits_scaling": 4.0},
    }
    (tmp_path / "config.json").write_text(json.dumps(document))
    torch.testing.assert_close(load_head(tmp_path), load_head(tiny_target) / 4)


def test_capped_logits_are_refused() -> None:
    with pytest.raises(DataError, match=r"caps its logits \(final_logit_softcapping 30"):
        logits_scale({"final_logit_softcapping": 30.0})
