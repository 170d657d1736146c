"""Facts of a target directory, its hashes, and the capture contract made of them."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from specfleet.config import parse_config
from specfleet.contracts.capture import contract_hash
from specfleet.contracts.errors import EXIT_BAD_INPUT, ConfigError
from specfleet.target import facts as facts_module
from specfleet.target.facts import build_contract, read_target_facts, read_text_facts, tokenizer_hash


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECFLEET_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def target(tiny_target: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(tiny_target, tmp_path / "target"))


def edit(path: Path, **changes: Any) -> None:
    document = json.loads(path.read_text())
    for key, value in changes.items():
        if value is None:
            document.pop(key, None)
        else:
            document[key] = value
    path.write_text(json.dumps(document))


def refused(path: Path, code: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read_target_facts(path)
    assert (caught.value.code, caught.value.exit_code) == (code, EXIT_BAD_INPUT)
    return caught.value.message


def test_sizes_and_ids(tiny_target: Path) -> None:
    facts = read_target_facts(tiny_target)
    assert (facts.hidden_size, facts.num_hidden_layers, facts.vocab_size) == (32, 6, 384)
    assert (facts.dtype, facts.eos_token_ids, facts.bos_token_id) == ("float32", (2,), 0)
    assert (facts.architecture, facts.tie_word_embeddings) == ("LlamaForCausalLM", True)
    assert facts.config["model_type"] == "llama"
    assert facts.text_config is facts.config
    assert len(facts.weights_hash) == len(facts.tokenizer_hash) == 64


def test_a_language_model_inside_a_larger_one(target: Path) -> None:
    text = json.loads((target / "config.json").read_text())
    outer = {
        "model_type": "vlm",
        "architectures": ["Vlm"],
        "text_config": text,
        "tie_word_embeddings": False,
        "hidden_size": 7,
    }
    (target / "config.json").write_text(json.dumps(outer))
    facts = read_target_facts(target)
    assert (facts.hidden_size, facts.dtype, facts.architecture) == (32, "float32", "Vlm")
    assert facts.text_config == text
    assert facts.tie_word_embeddings is False


def test_stop_ids_of_both_files(target: Path) -> None:
    edit(target / "generation_config.json", eos_token_id=[7, 2])
    edit(target / "config.json", eos_token_id=[9])
    assert read_target_facts(target).eos_token_ids == (2, 7, 9)
    assert read_text_facts(target).eos_token_ids == (2, 7, 9)
    (target / "generation_config.json").unlink()
    assert read_target_facts(target).eos_token_ids == (9,)


def test_dtype_of_old_and_silent_configs(target: Path) -> None:
    edit(target / "config.json", dtype=None, torch_dtype="bfloat16")
    assert read_target_facts(target).dtype == "bfloat16"
    edit(target / "config.json", torch_dtype=None)
    assert read_target_facts(target).dtype == "float32"


def test_the_weights_hash_follows_contents_not_places(target: Path, tmp_path: Path) -> None:
    before = read_target_facts(target)
    moved = target.rename(tmp_path / "moved")
    assert read_target_facts(moved).weights_hash == before.weights_hash
    weights = moved / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    after = read_target_facts(moved)
    assert after.weights_hash != before.weights_hash
    assert after.tokenizer_hash == before.tokenizer_hash


def test_the_config_is_part_of_the_weights_hash(target: Path) -> None:
    before = read_target_facts(target).weights_hash
    edit(target / "config.json", rms_norm_eps=1e-5)
    assert read_target_facts(target).weights_hash != before


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_the_tokenizer_hash_follows_every_file_that_matters(target: Path, name: str) -> None:
    before = tokenizer_hash(target)
    path = target / name
    path.write_text(path.read_text() + " ")
    assert tokenizer_hash(target) != before


def test_old_files_are_hashed_once(target: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in target.iterdir():
        os.utime(path, (1_000_000_000, 1_000_000_000))
    first = read_target_facts(target)
    assert list((own_cache / "hashes").glob("*.json"))
    hashed: list[str] = []
    digest = facts_module.sha256_file.__globals__["hashlib"].file_digest
    monkeypatch.setattr("hashlib.file_digest", lambda file, name: hashed.append(file.name) or digest(file, name))
    assert read_target_facts(target) == first
    assert hashed == []
    # Same size, other time: hashed again.
    os.utime(target / "model.safetensors", (1_000_000_001, 1_000_000_001))
    assert read_target_facts(target) == first
    assert [Path(name).name for name in hashed] == ["model.safetensors"]


def test_a_file_that_just_changed_is_not_remembered(target: Path, own_cache: Path) -> None:
    for path in target.iterdir():
        path.touch()
    read_target_facts(target)
    assert not (own_cache / "hashes").exists()


def test_a_cache_that_cannot_be_written_costs_only_time(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPECFLEET_CACHE", str(tmp_path / "file" / "below"))
    for path in target.iterdir():
        os.utime(path, (1_000_000_000, 1_000_000_000))
    assert read_target_facts(target).hidden_size == 32


def test_sharded_weights(target: Path) -> None:
    content = (target / "model.safetensors").read_bytes()
    (target / "model.safetensors").unlink()
    for name in ("model-1.safetensors", "model-2.safetensors"):
        (target / name).write_bytes(content)
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    assert read_target_facts(target).dtype == "float32"
    (target / "model-2.safetensors").unlink()
    assert "1 are missing: model-2.safetensors" in refused(target, "SF-TARGET-NO-WEIGHTS")


def test_a_missing_directory(tmp_path: Path) -> None:
    assert "nowhere" in refused(tmp_path / "nowhere", "SF-TARGET-MISSING")


def test_a_file_instead_of_a_directory(target: Path) -> None:
    refused(target / "config.json", "SF-TARGET-NOT-A-MODEL")


def test_a_directory_without_a_model(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    assert "notes.txt" in refused(tmp_path, "SF-TARGET-NOT-A-MODEL")


def test_a_config_that_is_not_json(target: Path) -> None:
    (target / "config.json").write_text("{")
    refused(target, "SF-TARGET-NOT-A-MODEL")


def test_a_config_of_something_else(target: Path) -> None:
    edit(target / "config.json", hidden_size=None)
    assert "hidden_size is None" in refused(target, "SF-TARGET-NOT-A-MODEL")


def test_no_weights(target: Path) -> None:
    (target / "model.safetensors").unlink()
    refused(target, "SF-TARGET-NO-WEIGHTS")


@pytest.mark.parametrize("content", [b"\xff" * 8, b"version https://git-lfs.github.com/spec/v1\n"])
def test_weights_that_are_not_safetensors(target: Path, content: bytes) -> None:
    (target / "model.safetensors").write_bytes(content)
    refused(target, "SF-TARGET-NO-WEIGHTS")


def test_weights_that_are_cut_short_show_both_sizes(target: Path) -> None:
    weights = target / "model.safetensors"
    size = weights.stat().st_size
    os.truncate(weights, size - 1000)
    message = refused(target, "SF-TARGET-NO-WEIGHTS")
    assert f"{size - 1000:,} bytes" in message
    assert f"{size:,}" in message


def test_no_tokenizer(target: Path) -> None:
    (target / "tokenizer.json").unlink()
    assert "save_pretrained" in refused(target, "SF-TARGET-NO-TOKENIZER")


def test_the_contract_of_a_run(target: Path) -> None:
    config = parse_config(
        f"model: {{target: {target}, dtype: bfloat16}}\n"
        "data: {train: [x]}\n"
        "strategy: {name: eagle3, layers: [0, 2, 4]}\n"
        "capture: {extras: [teacher_lse, teacher_argmax]}\n"
    )
    facts = read_target_facts(target)
    contract = build_contract(config, facts)
    assert (list(contract.layers), contract.final_state, contract.dtype) == ([0, 2, 4], "post_norm", "bfloat16")
    assert (contract.hidden_size, contract.num_hidden_layers, contract.vocab_size) == (32, 6, 384)
    assert list(contract.extras) == ["teacher_argmax", "teacher_lse"]
    assert (contract.weights_hash, contract.tokenizer_hash) == (facts.weights_hash, facts.tokenizer_hash)
    assert len(contract_hash(contract)) == 64


def test_layers_that_the_target_lacks_are_refused(target: Path) -> None:
    config = parse_config(
        f"model: {{target: {target}}}\ndata: {{train: [x]}}\nstrategy: {{name: eagle3, layers: [1, 5]}}"
    )
    with pytest.raises(ConfigError, match="SF-CONFIG-LAYERS"):
        build_contract(config, read_target_facts(target))
