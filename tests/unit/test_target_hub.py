"""Targets of the Hugging Face Hub, fetched from a stand-in over HTTP: what is fetched, pinned, and refused."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from fixtures.hub import StandInHub, stand_in_hub
from safetensors.torch import load_file, save_file

from specfleet.contracts.errors import EXIT_BAD_INPUT, EXIT_ENVIRONMENT, HostError, SpecfleetError
from specfleet.target.facts import read_target_facts, read_text_facts, tokenizer_hash
from specfleet.target.hub import hub_name, pinned_target, target_dir, target_facts
from specfleet.target.weights import load_embedding, load_head

NAME = "org/tiny-llama"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInHub]:
    """HF_ENDPOINT, HF_HOME and SPECFLEET_CACHE of the test's own. huggingface_hub reads its variables when it is imported."""
    monkeypatch.setenv("SPECFLEET_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hf"))
    monkeypatch.chdir(tmp_path)
    with stand_in_hub() as hub:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
        template = "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", hub.url + template)
        yield hub


@pytest.fixture
def sharded(tiny_target: Path, tmp_path: Path) -> Path:
    """The tiny target in three shards, of which the second holds neither embedding nor head, with what else repositories hold."""
    directory = Path(shutil.copytree(tiny_target, tmp_path / "source"))
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * 2
    weight_map = {
        name: f"model-0000{1 if 'embed' in name else 3 if 'lm_head' in name else 2}-of-00003.safetensors"
        for name in tensors
    }
    for file in set(weight_map.values()):
        save_file({n: t for n, t in tensors.items() if weight_map[n] == file}, directory / file, {"format": "pt"})
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for waste in ("pytorch_model.bin", "consolidated.safetensors", "original/consolidated.00.pth"):
        (directory / waste).parent.mkdir(exist_ok=True)
        (directory / waste).write_bytes(b"twice the download")
    return directory


def refused(name: str) -> SpecfleetError:
    with pytest.raises(SpecfleetError) as caught:
        target_dir(name)
    return caught.value


def test_directories_are_no_names_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("models/qwen").mkdir(parents=True)
    assert hub_name("models/qwen") is None
    assert pinned_target("models/qwen") == str(tmp_path / "models/qwen")
    for path in ("/models/x", "./models/x", "../x/y", "~/models/x", "builtin:demo", "qwen", "a/b/c"):
        assert hub_name(path) is None, path
    assert hub_name("Qwen/Qwen3-0.6B") == ("Qwen/Qwen3-0.6B", None)
    assert hub_name("Qwen/Qwen3-0.6B@refs/pr/1") == ("Qwen/Qwen3-0.6B", "refs/pr/1")


def test_each_service_fetches_what_it_needs(hub: StandInHub, sharded: Path) -> None:
    commit = hub.publish(NAME, sharded)
    name = pinned_target(NAME)
    assert name == f"{NAME}@{commit}"
    assert not [file for file in hub.served if file.endswith((".safetensors", ".bin", ".pth"))]
    text = target_dir(name, "none")
    assert read_text_facts(text) == read_text_facts(sharded)
    assert tokenizer_hash(text) == tokenizer_hash(sharded)

    trainer = target_dir(name, "vocabulary")
    assert sorted(file for file in hub.served if file.endswith(".safetensors")) == [
        "model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors",
    ]  # fmt: skip
    assert load_embedding(trainer).equal(load_embedding(sharded))
    assert load_head(trainer).equal(load_embedding(sharded) * 2)

    facts = read_target_facts(target_dir(name))
    assert (facts.weights_hash, facts.tokenizer_hash) == (
        read_target_facts(sharded).weights_hash,
        tokenizer_hash(sharded),
    )
    assert not {"pytorch_model.bin", "consolidated.safetensors", "original/consolidated.00.pth"} & set(hub.served)
    assert len(hub.served) == len(set(hub.served)), "nothing is fetched twice"


def test_a_contract_needs_no_weights(hub: StandInHub, sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"{NAME}@{hub.publish(NAME, sharded)}"
    facts, whole = target_facts(name), read_target_facts(sharded)
    assert not [file for file in hub.served if file.endswith(".safetensors")]
    assert (facts.weights_hash, facts.tokenizer_hash) == (whole.weights_hash, whole.tokenizer_hash)
    assert (facts.text_config, facts.dtype) == (whole.text_config, whole.dtype)
    # Without the Hub it is the weights in the cache that are hashed.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(HostError, match="SF-HUB-OFFLINE"):
        target_facts(name)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    target_dir(name)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert target_facts(name).weights_hash == whole.weights_hash


def test_a_pinned_target_stays_when_its_branch_moves(hub: StandInHub, tiny_target: Path, tmp_path: Path) -> None:
    first = hub.publish(NAME, tiny_target)
    name = pinned_target(NAME)
    changed = Path(shutil.copytree(tiny_target, tmp_path / "changed"))
    config = json.loads((changed / "config.json").read_text())
    (changed / "config.json").write_text(json.dumps(config | {"rope_theta": 5.0}))
    second = hub.publish(NAME, changed)
    assert pinned_target(name) == name == f"{NAME}@{first}"
    assert pinned_target(f"{NAME}@main") == f"{NAME}@{second}"
    assert read_target_facts(target_dir(name)).weights_hash == read_target_facts(tiny_target).weights_hash
    assert read_target_facts(target_dir(NAME)).config["rope_theta"] == 5.0


def test_without_a_network_the_cache_serves(hub: StandInHub, sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = hub.publish(NAME, sharded)
    target_dir(NAME, "vocabulary")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert pinned_target(NAME) == f"{NAME}@{commit}"
    load_head(target_dir(NAME, "vocabulary"))
    error = refused(NAME)
    assert (error.code, error.exit_code) == ("SF-HUB-OFFLINE", EXIT_ENVIRONMENT)
    assert "model-00001-of-00003.safetensors" in error.message
    assert f"hf download {NAME}" in error.message
    assert refused("org/never-seen").code == "SF-HUB-OFFLINE"


def test_a_hub_that_does_not_answer(hub: StandInHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    assert refused(NAME).code == "SF-HUB-OFFLINE"


def test_what_is_not_there_or_not_allowed(hub: StandInHub, tiny_target: Path, tmp_path: Path) -> None:
    missing = refused("org/tinny-llama")
    assert (missing.code, missing.exit_code) == ("SF-HUB-NOT-FOUND", EXIT_BAD_INPUT)
    assert "neither a directory here" in missing.message
    hub.publish(NAME, tiny_target)
    assert "'v2'" in refused(f"{NAME}@v2").message
    hub.publish("org/gated", tiny_target)
    hub.repositories["org/gated"].gated = True
    gated = refused("org/gated")
    assert (gated.code, gated.exit_code) == ("SF-HUB-GATED", EXIT_ENVIRONMENT)
    assert "HF_TOKEN" in gated.message


def test_weights_that_are_not_safetensors(hub: StandInHub, tiny_target: Path, tmp_path: Path) -> None:
    old = Path(shutil.copytree(tiny_target, tmp_path / "old"))
    (old / "model.safetensors").rename(old / "pytorch_model.bin")
    hub.publish("org/old", old)
    assert refused("org/old").code == "SF-TARGET-NO-WEIGHTS"
    assert "pytorch_model.bin" not in hub.served
