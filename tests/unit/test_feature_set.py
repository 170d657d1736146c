"""Feature sets on disk: format, resumption after a kill, damage, and what verify finds."""

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from fixtures.coordinator_life import CONTRACT, write_prompt_set
from fixtures.feature_sets import random_features, write_feature_set
from safetensors import safe_open
from typer.testing import CliRunner

from specfleet.contracts.errors import DataError, FeatureLostError, HostError
from specfleet.ctl.app import app
from specfleet.data.prompt_set import PromptSet
from specfleet.features.feature_set import FeatureSet
from specfleet.features.manifest import read_manifest
from specfleet.features.verify import verify
from specfleet.features.writer import FeatureSetWriter
from specfleet.store.tensors import byte_view
from specfleet.wire.records_pb2 import CaptureContract

PROMPTS = 20


@pytest.fixture
def prompts(tmp_path: Path) -> PromptSet:
    return PromptSet.open(write_prompt_set(tmp_path / "prompts", PROMPTS))


def shards(directory: Path) -> list[Path]:
    return sorted(directory.glob("shard-*.safetensors"))


def test_what_is_written_is_read_bit_for_bit(tmp_path: Path, prompts: PromptSet) -> None:
    found = FeatureSet.open(write_feature_set(tmp_path / "set", CONTRACT, prompts, shard_bytes=1000))
    assert len(shards(found.path)) > 2
    assert found.num_tokens.tolist() == prompts.num_tokens.tolist()
    assert found.num_loss_tokens.tolist() == prompts.num_loss_tokens.tolist()
    assert found.prompts.digest == prompts.digest
    for prompt in prompts.read(range(PROMPTS)):
        read = found.read(prompt.index)
        for name, tensor in random_features(CONTRACT, prompt).items():
            assert np.array_equal(read[name], byte_view(name, tensor))
    verdict = verify(found.path)
    assert (verdict.problems, verdict.complete, verdict.rows, verdict.missing) == ([], True, PROMPTS, 0)
    assert verdict.bytes == sum(path.stat().st_size for path in shards(found.path))


def test_shards_are_plain_safetensors(tmp_path: Path, prompts: PromptSet) -> None:
    directory = write_feature_set(tmp_path / "set", CONTRACT, prompts, shard_bytes=1 << 20)
    (path,) = shards(directory)
    with safe_open(path, "pt") as file:
        assert file.get_tensor("prompt_index").tolist() == list(range(PROMPTS))
        tokens = file.get_tensor("num_tokens").tolist()
        assert tokens == prompts.num_tokens.tolist()
        begin = sum(tokens[:7])
        wanted = random_features(CONTRACT, prompts.read([7])[0])
        for name, tensor in wanted.items():
            assert torch.equal(file.get_slice(name)[begin : begin + tokens[7]], tensor)


def test_the_manifest_names_no_path_of_this_machine(tmp_path: Path, prompts: PromptSet) -> None:
    directory = write_feature_set(tmp_path / "set", CONTRACT, prompts)
    text = (directory / "manifest.json").read_text()
    assert str(tmp_path) not in text
    assert "/nowhere" not in text
    assert read_manifest(directory)[0].contract.target == "target"
    of_the_hub = CaptureContract()
    of_the_hub.CopyFrom(CONTRACT)
    of_the_hub.target = "org/name@0123abc"
    directory = write_feature_set(tmp_path / "hub", of_the_hub, prompts)
    assert read_manifest(directory)[0].contract.target == of_the_hub.target


def test_a_writer_goes_on_after_the_last_listed_shard(tmp_path: Path, prompts: PromptSet) -> None:
    directory, rows = tmp_path / "set", prompts.read(range(PROMPTS))
    first = FeatureSetWriter.open(directory, CONTRACT, prompts, 1 << 20)
    for prompt in rows[:6]:
        first.add(prompt.index, random_features(CONTRACT, prompt))
    first.flush()
    for prompt in rows[6:9]:
        first.add(prompt.index, random_features(CONTRACT, prompt))
    first.close()  # as a kill would: three prompts were never flushed
    whole = shards(directory)[0].read_bytes()
    (directory / "shard-00001.safetensors").write_bytes(whole[:100])  # written, but its manifest was not
    (directory / ".shard-00002.safetensors.partial").write_bytes(b"torn")

    second = FeatureSetWriter.open(directory, CONTRACT, prompts, 1 << 20)
    assert second.recorded == set(range(6))
    assert [path.name for path in shards(directory)] == ["shard-00000.safetensors"]
    assert not list(directory.glob(".*.partial"))
    for prompt in rows[6:]:
        second.add(prompt.index, random_features(CONTRACT, prompt))
    assert second.finish().complete
    second.close()
    assert verify(directory).problems == []
    third = FeatureSetWriter.open(directory, CONTRACT, prompts)
    with pytest.raises(DataError, match="SF-FEATURES-COMPLETE"):
        third.add(0, random_features(CONTRACT, rows[0]))
    third.close()


def test_a_set_is_finished_only_when_every_prompt_is_recorded_or_dead(tmp_path: Path, prompts: PromptSet) -> None:
    writer = FeatureSetWriter.open(tmp_path / "set", CONTRACT, prompts)
    for prompt in prompts.read(range(PROMPTS - 2)):
        writer.add(prompt.index, random_features(CONTRACT, prompt))
    with pytest.raises(DataError, match=r"has 18 of 20 prompts and 1 are dead; 1 are missing, the first is 19"):
        writer.finish({18: "NaN"})
    verdict = verify(tmp_path / "set")
    assert (verdict.missing, verdict.complete) == (2, False)
    assert writer.finish({18: "NaN", 19: "NaN"}).dead == {18: "NaN", 19: "NaN"}
    assert verify(tmp_path / "set").problems == []
    assert FeatureSet.open(tmp_path / "set").missing().tolist() == []


def test_another_contract_or_prompt_set_is_refused_with_both_values(tmp_path: Path, prompts: PromptSet) -> None:
    FeatureSetWriter.open(tmp_path / "set", CONTRACT, prompts).close()
    other = CaptureContract()
    other.CopyFrom(CONTRACT)
    other.layers[:] = [1, 3]
    with pytest.raises(DataError, match=re.escape("layers: expected [1, 2], measured [1, 3]")):
        FeatureSetWriter.open(tmp_path / "set", other, prompts)
    others = PromptSet.open(write_prompt_set(tmp_path / "others", PROMPTS, seed=1))
    with pytest.raises(DataError, match=f"prompt set: recorded {prompts.digest}, wanted {others.digest}"):
        FeatureSetWriter.open(tmp_path / "set", CONTRACT, others)
    with pytest.raises(DataError, match="is not a feature set and not empty"):
        FeatureSetWriter.open(tmp_path, CONTRACT, prompts)


def test_only_one_writer_at_a_time(tmp_path: Path, prompts: PromptSet) -> None:
    first = FeatureSetWriter.open(tmp_path / "set", CONTRACT, prompts)
    with pytest.raises(HostError, match="another process is writing"):
        FeatureSetWriter.open(tmp_path / "set", CONTRACT, prompts)
    first.close()
    FeatureSetWriter.open(tmp_path / "set", CONTRACT, prompts).close()


def test_a_sample_that_is_not_what_the_contract_says_is_refused(tmp_path: Path, prompts: PromptSet) -> None:
    writer = FeatureSetWriter.open(tmp_path / "set", CONTRACT, prompts)
    (prompt,) = prompts.read([3])
    features = random_features(CONTRACT, prompt)
    with pytest.raises(DataError, match="final_state is absent"):
        writer.add(3, {name: tensor for name, tensor in features.items() if name != "final_state"})
    with pytest.raises(DataError, match=r"aux_states is float32 \["):
        writer.add(3, features | {"aux_states": features["aux_states"].float()})
    assert writer.recorded == set()
    writer.add(3, features)
    with pytest.raises(DataError, match="prompt 3 is recorded in"):
        writer.add(3, features)


def test_a_flipped_byte_is_found_by_verify_and_by_the_reader(tmp_path: Path, prompts: PromptSet) -> None:
    directory = write_feature_set(tmp_path / "set", CONTRACT, prompts, shard_bytes=1000)
    damaged = shards(directory)[1]
    found = FeatureSet.open(directory)
    with damaged.open("r+b") as file:
        file.seek(-1, os.SEEK_END)  # the last byte of the last row's loss mask
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    victim = int(np.flatnonzero([found.shard_of(i).file == damaged.name for i in range(PROMPTS)])[-1])
    with pytest.raises(FeatureLostError, match=f"{damaged.name}: loss_mask of prompt {victim} was altered"):
        found.read(victim)
    found.read(0)
    verdict = verify(directory)
    assert verdict.num_problems == 2
    assert f"{damaged.name} has sha256" in verdict.problems[0]
    assert f"prompt {victim}" in verdict.problems[1]


def test_the_command_line_shows_and_checks_sets(tmp_path: Path, prompts: PromptSet) -> None:
    directory = write_feature_set(tmp_path / "set", CONTRACT, prompts)
    invoke = CliRunner().invoke
    stats = json.loads(invoke(app, ["data", "stats", str(directory), "--json"]).output)
    assert (stats["recorded"], stats["complete"], stats["layers"]) == (PROMPTS, True, [1, 2])
    assert stats["digest"] == FeatureSet.open(directory).digest
    sound = invoke(app, ["data", "verify", str(directory)])
    assert (sound.exit_code, "the feature set is sound" in sound.output) == (0, True)
    assert json.loads(invoke(app, ["data", "verify", str(prompts.path), "--json"]).output)["prompts"] == PROMPTS
    (shard, *_) = shards(directory)
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 1
    shard.write_bytes(raw)
    broken = invoke(app, ["data", "verify", str(directory), "--json"])
    assert broken.exit_code == 1
    assert f"{shard.name} has sha256" in json.loads(broken.output)["problems"][0]


def test_a_short_or_absent_shard_is_named(tmp_path: Path, prompts: PromptSet) -> None:
    directory = write_feature_set(tmp_path / "set", CONTRACT, prompts, shard_bytes=1000)
    path = shards(directory)[0]
    found = FeatureSet.open(directory)
    os.truncate(path, path.stat().st_size - 10)
    with pytest.raises(DataError, match=rf"{path.name}: it has \d+ bytes, its manifest says \d+"):
        FeatureSet.open(directory)
    path.unlink()
    with pytest.raises(FeatureLostError, match=f"{path.name} is gone"):
        found.read(0)


def test_verify_counts_values_that_are_not_finite(tmp_path: Path, prompts: PromptSet) -> None:
    writer = FeatureSetWriter.open(tmp_path / "set", CONTRACT, prompts)
    for prompt in prompts.read(range(PROMPTS)):
        features = random_features(CONTRACT, prompt)
        if prompt.index == 5:
            features["aux_states"][0, :2] = torch.tensor([float("nan"), float("-inf")])
        writer.add(prompt.index, features)
    writer.finish()
    verdict = verify(tmp_path / "set")
    assert verdict.nonfinite == 2
    assert verdict.problems == ["prompt 5 in shard-00000.safetensors: aux_states holds 2 NaN or infinite values"]


def test_verify_compares_with_the_prompt_set(tmp_path: Path, prompts: PromptSet) -> None:
    writer = FeatureSetWriter.open(tmp_path / "set", CONTRACT, prompts)
    for prompt in prompts.read(range(PROMPTS)):
        features = random_features(CONTRACT, prompt)
        if prompt.index == 4:
            features["input_ids"] += 1
        writer.add(prompt.index, features)
    writer.finish()
    assert verify(tmp_path / "set").problems == [
        "prompt 4 in shard-00000.safetensors: its tokens are not those of the prompt set"
    ]
