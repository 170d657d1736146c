"""Checkpoints on disk: round trip, torn writes, altered files, identity, rotation."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fixtures.tiny_strategy import TinyStrategy

from specfleet.contracts.errors import ContractError
from specfleet.trainer.checkpoint import CheckpointFolder, Facts, Saved, file_sha256, read_checkpoint, restore
from specfleet.trainer.optim import MasterAdamW
from specfleet.trainer.parallel import Ranks
from specfleet.wire.records_pb2 import CaptureContract

FACTS = Facts(
    run_id="run-1",
    generation=2,
    strategy="tiny",
    identity={"strategy": "tiny", "mask_token_id": "7"},
    contract=CaptureContract(target="/models/t", weights_hash="w", layers=[1, 2], hidden_size=4, vocab_size=9),
    prompt_set="ab" * 32,
    target="/models/t",
)


def train(strategy: TinyStrategy, optimizer: MasterAdamW) -> None:
    strategy.draft(torch.randn(3, 4).to(strategy.dtype)).float().square().sum().backward()
    optimizer.collect()
    optimizer.step(1e-2, Ranks())


def make(seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> tuple[TinyStrategy, MasterAdamW]:
    strategy = TinyStrategy(dtype, seed)
    return strategy, MasterAdamW(strategy.draft.named_parameters())


def save(root: Path, step: int = 3) -> tuple[Saved, TinyStrategy, MasterAdamW]:
    strategy, optimizer = make()
    train(strategy, optimizer)
    return CheckpointFolder(root).save(step, FACTS, strategy.draft, optimizer, Ranks()), strategy, optimizer


def test_round_trip_restores_weights_moments_and_random_state(tmp_path: Path) -> None:
    saved, strategy, optimizer = save(tmp_path)
    expected_random = torch.rand(4)
    train(strategy, optimizer)
    other, other_optimizer = make(seed=5)
    restored = restore(Path(saved.uri), saved.digest, FACTS, other.draft, other_optimizer, Ranks())
    assert restored == saved
    assert torch.equal(torch.rand(4), expected_random)
    train(other, other_optimizer)
    for name, tensor in strategy.draft.state_dict().items():
        assert torch.equal(tensor, other.draft.state_dict()[name]), name
    assert all(torch.equal(tensor, other_optimizer.state()[name]) for name, tensor in optimizer.state().items())


def test_contents_are_what_the_design_says(tmp_path: Path) -> None:
    saved, _, _ = save(tmp_path)
    directory = tmp_path / "step-00000003"
    assert saved.uri == str(directory)
    assert {path.name for path in directory.iterdir()} == {
        "checkpoint.json", "draft.safetensors", "optimizer-rank0.safetensors", "trainer-rank0.json",
    }  # fmt: skip
    assert saved.digest == file_sha256(directory / "checkpoint.json")
    meta = read_checkpoint(directory, saved.digest)
    assert meta["draft"] == {"kind": "tiny", "config": {"hidden": 4}}
    assert meta["contract"]["layers"] == [1, 2]
    assert (meta["step"], meta["generation"], meta["world"]) == (3, 2, 1)


def test_torn_write_does_not_exist_and_is_cleaned(tmp_path: Path) -> None:
    save(tmp_path, 3)
    folder = CheckpointFolder(tmp_path)
    partial = tmp_path / ".partial-2-00000004"
    partial.mkdir()
    (partial / "draft.safetensors").write_bytes(b"half")
    torn = tmp_path / "step-00000005"
    torn.mkdir()
    (torn / "draft.safetensors").write_bytes(b"half")
    assert folder.steps() == [3]
    folder.clean()
    assert not partial.exists()
    with pytest.raises(ContractError) as caught:
        read_checkpoint(torn)
    assert caught.value.code == "SF-CHECKPOINT-MISSING"


@pytest.mark.parametrize("name", ["draft.safetensors", "optimizer-rank0.safetensors", "trainer-rank0.json"])
def test_altered_or_missing_file_is_refused(tmp_path: Path, name: str) -> None:
    saved, _, _ = save(tmp_path)
    path = Path(saved.uri) / name
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    strategy, optimizer = make(seed=5)
    with pytest.raises(ContractError, match=name) as caught:
        restore(Path(saved.uri), saved.digest, FACTS, strategy.draft, optimizer, Ranks())
    assert caught.value.code == "SF-CHECKPOINT-HASH"
    path.unlink()
    with pytest.raises(ContractError, match=name) as caught:
        read_checkpoint(Path(saved.uri))
    assert caught.value.code == "SF-CHECKPOINT-MISSING"


def test_altered_description_is_refused(tmp_path: Path) -> None:
    saved, _, _ = save(tmp_path)
    meta = Path(saved.uri) / "checkpoint.json"
    meta.write_text(json.dumps({**json.loads(meta.read_text()), "step": 4}))
    with pytest.raises(ContractError) as caught:
        read_checkpoint(Path(saved.uri), saved.digest)
    assert caught.value.code == "SF-CHECKPOINT-HASH"
    assert saved.digest in caught.value.message


@pytest.mark.parametrize(
    ("facts", "shown"),
    [
        (replace(FACTS, identity={"strategy": "tiny", "mask_token_id": "8"}), "mask_token_id: checkpoint '7', run '8'"),
        (replace(FACTS, identity={"strategy": "tiny"}), "mask_token_id: checkpoint '7', run None"),
        (replace(FACTS, prompt_set="cd" * 32), f"prompt_set: checkpoint '{'ab' * 32}', run '{'cd' * 32}'"),
        (replace(FACTS, contract=CaptureContract(weights_hash="other")), "contract_hash: checkpoint"),
    ],
)
def test_other_training_is_refused_with_both_values(tmp_path: Path, facts: Facts, shown: str) -> None:
    saved, _, _ = save(tmp_path)
    strategy, optimizer = make(seed=5)
    before = strategy.draft.map.weight.clone()
    with pytest.raises(ContractError) as caught:
        restore(Path(saved.uri), saved.digest, facts, strategy.draft, optimizer, Ranks())
    assert caught.value.code == "SF-CHECKPOINT-IDENTITY"
    assert shown in caught.value.message
    assert torch.equal(strategy.draft.map.weight, before)


def test_same_step_of_a_fenced_generation_is_replaced(tmp_path: Path) -> None:
    save(tmp_path)
    strategy, optimizer = make(seed=9)
    again = CheckpointFolder(tmp_path).save(3, replace(FACTS, generation=3), strategy.draft, optimizer, Ranks())
    assert read_checkpoint(Path(again.uri), again.digest)["generation"] == 3


def test_rotation_keeps_the_newest_and_always_the_committed_one(tmp_path: Path) -> None:
    strategy, optimizer = make()
    folder = CheckpointFolder(tmp_path)
    for step in (10, 20, 30, 40):
        folder.save(step, FACTS, strategy.draft, optimizer, Ranks())
    # 40 is written but not committed: it must not push the newest committed one out.
    folder.rotate(keep=1, committed_step=30)
    assert folder.steps() == [30, 40]
    folder.rotate(keep=2, committed_step=40)
    assert folder.steps() == [30, 40]
