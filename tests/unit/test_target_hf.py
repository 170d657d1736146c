"""The frozen target: captured states are transformers' own, item by item; weights are found in every checkpoint form."""

import json
from pathlib import Path

import pytest
import torch
from fixtures.eagle3 import LAYERS
from fixtures.tiny import make_tiny_target
from safetensors.torch import load_file, save_file

from specfleet.contracts.errors import CaptureItemError, ConfigError, ContractError, DataError
from specfleet.target.dtypes import compute_dtype
from specfleet.target.hf import HFTarget
from specfleet.target.weights import load_embedding, load_head, read_text_config

EXTRAS = ("teacher_argmax", "teacher_lse")
TEXTS = [[3, 4, 5, 6, 7], [8, 9], [10, 11, 12, 13, 14, 15, 16, 17, 18]]


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> HFTarget:
    return HFTarget.load(tiny_target, LAYERS, dtype="float32", extras=EXTRAS)


def test_captures_layer_outputs_and_the_state_that_enters_the_head(target: HFTarget) -> None:
    for text, item in zip(TEXTS, target.capture(TEXTS), strict=True):
        assert isinstance(item, dict)
        expected = target.model(input_ids=torch.tensor([text]), output_hidden_states=True)
        aux = torch.cat([expected.hidden_states[layer + 1][0] for layer in LAYERS], dim=-1)
        torch.testing.assert_close(item["aux_states"], aux, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(item["final_state"] @ target.head_VH.T, expected.logits[0], rtol=1e-4, atol=1e-4)
        assert torch.equal(item["teacher_argmax"], expected.logits[0].argmax(-1).int())
        torch.testing.assert_close(item["teacher_lse"], expected.logits[0].logsumexp(-1), rtol=1e-4, atol=1e-4)


def test_items_own_their_memory_without_padding(target: HFTarget) -> None:
    item = target.capture(TEXTS)[1]
    assert isinstance(item, dict)
    for tensor in item.values():
        assert tensor.shape[0] == 2
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        assert tensor.is_contiguous()


def test_one_bad_item_does_not_fail_its_neighbours(tiny_target: Path) -> None:
    target = HFTarget.load(tiny_target, LAYERS, dtype="float32")
    target.embedding_VH[9] = torch.nan
    results = target.capture([TEXTS[0], TEXTS[1], [], [400], [-1], TEXTS[2]])
    codes = [result.code if isinstance(result, CaptureItemError) else "" for result in results]
    assert codes == ["", "SF-CAPTURE-NONFINITE", "SF-CAPTURE-EMPTY", "SF-CAPTURE-TOKEN", "SF-CAPTURE-TOKEN", ""]
    assert all(isinstance(result, dict) for result in (results[0], results[5]))


def test_features_have_the_contract_dtype_and_only_what_was_asked_for(tiny_target: Path) -> None:
    target = HFTarget.load(tiny_target, (1,), dtype="bfloat16", final_state="none")
    item = target.capture(TEXTS[:1])[0]
    assert isinstance(item, dict)
    assert {name: tensor.dtype for name, tensor in item.items()} == {"aux_states": torch.bfloat16}
    assert item["aux_states"].shape == (5, 32)


def test_a_forward_that_stops_early_gives_the_same_states(target: HFTarget, tiny_target: Path) -> None:
    early = HFTarget.load(tiny_target, LAYERS, dtype="float32", final_state="none")
    ran: list[int] = []
    early.model.model.layers[LAYERS[-1] + 1].register_forward_hook(lambda *_: ran.append(1))
    for a, b in zip(early.capture(TEXTS), target.capture(TEXTS), strict=True):
        assert isinstance(a, dict)
        assert isinstance(b, dict)
        assert torch.equal(a["aux_states"], b["aux_states"])
    assert not ran
    early.forward(torch.tensor([[1, 2]]))
    assert ran


def test_cached_forward_after_a_crop_equals_one_pass(target: HFTarget) -> None:
    text = TEXTS[2]
    logits, aux, final = target.forward(torch.tensor([text]))
    cache = target.new_cache()
    target.forward(torch.tensor([text[:4]]), cache)
    target.forward(torch.tensor([[100, 101, 102]]), cache)
    target.crop(cache, 4)
    target.crop(cache, 99)  # longer than the cache: nothing to forget
    parts = target.forward(torch.tensor([text[4:]]), cache)
    for got, expected in zip(parts, (logits, aux, final), strict=True):
        torch.testing.assert_close(got, expected[4:], rtol=1e-4, atol=1e-4)


def test_facts_are_those_of_the_directory(target: HFTarget) -> None:
    assert (target.facts.hidden_size, target.facts.num_hidden_layers, target.facts.vocab_size) == (32, 6, 384)


def test_a_layer_out_of_range_is_refused(tiny_target: Path) -> None:
    with pytest.raises(ConfigError, match="layer 6 is out of range"):
        HFTarget.load(tiny_target, (1, 6), dtype="float32")


def test_a_target_that_scales_its_logits_is_refused(tiny_target: Path) -> None:
    model = HFTarget.load(tiny_target, (), dtype="float32").model
    model.register_forward_hook(lambda _module, _args, output: setattr(output, "logits", output.logits / 4) or output)
    with pytest.raises(ContractError, match="scales or caps logits"):
        HFTarget("scaled", model, (1,), torch.float32, "post_norm", ())


def test_arithmetic_is_fp32_only_where_the_cpu_lacks_bf16() -> None:
    native = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert compute_dtype(torch.bfloat16, "cpu") == (torch.bfloat16 if native else torch.float32)
    assert compute_dtype(torch.bfloat16, "cuda") == torch.bfloat16
    assert compute_dtype(torch.float32, "cpu") == torch.float32


def test_weights_of_tied_and_untied_checkpoints(tiny_target: Path, tmp_path: Path) -> None:
    embedding = load_embedding(tiny_target)
    assert embedding.shape == (384, 32)
    assert torch.equal(load_head(tiny_target), embedding)
    untied = make_tiny_target(tmp_path / "untied", num_hidden_layers=5, tie_word_embeddings=False)
    assert not torch.equal(load_head(untied), load_embedding(untied))


def test_weights_of_sharded_nested_checkpoints(tiny_target: Path, tmp_path: Path) -> None:
    """Two shards with an index, a multimodal prefix, a vision tower with an embedding of its own, sizes in text_config."""
    embedding = load_embedding(tiny_target)
    head = torch.arange(12.0).view(4, 3)
    save_file({"model.language_model.embed_tokens.weight": embedding}, tmp_path / "a.safetensors")
    save_file({"lm_head.weight": head, "model.visual.embed_tokens.weight": head + 1}, tmp_path / "b.safetensors")
    index = {
        "model.language_model.embed_tokens.weight": "a.safetensors", "lm_head.weight": "b.safetensors",
        "model.visual.embed_tokens.weight": "b.safetensors",
    }  # fmt: skip
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    config = {"tie_word_embeddings": False, "text_config": {"hidden_size": 3, "vocab_size": 4}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert torch.equal(load_embedding(tmp_path), embedding)
    assert torch.equal(load_head(tmp_path), head)
    assert read_text_config(tmp_path) == {"hidden_size": 3, "vocab_size": 4, "tie_word_embeddings": False}


def test_missing_weights_are_named(tiny_target: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not a directory"):
        load_embedding(tmp_path / "absent")
    with pytest.raises(DataError, match=r"no \*\.safetensors"):
        load_embedding(tmp_path)
    tensors = load_file(tiny_target / "model.safetensors")
    save_file({"model.norm.weight": tensors["model.norm.weight"]}, tmp_path / "model.safetensors")
    with pytest.raises(DataError, match="input embedding"):
        load_embedding(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"tie_word_embeddings": False}))
    with pytest.raises(DataError, match="incomplete"):
        load_head(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"garbage")
    with pytest.raises(DataError, match="not a readable"):
        load_embedding(tmp_path)
