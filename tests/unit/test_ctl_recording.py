"""What `specctl data capture` asks for, and what it refuses before anything runs."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from fixtures.feature_sets import write_feature_set

from specfleet.config import parse_config
from specfleet.contracts.capture import bytes_per_token
from specfleet.contracts.errors import ConfigError, DataError, HostError
from specfleet.ctl import recording
from specfleet.data.prompt_set import PromptSet
from specfleet.wire.run_pb2 import RunSnapshot, SubmitRunRequest

Build = Callable[..., SubmitRunRequest | None]


@pytest.fixture
def build(tmp_path: Path, tiny_target: Path) -> Build:
    """build(*overrides, runs=…): the request for a set in `set`."""
    rows = [
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": f"I am {n}."}]}
        for n in range(6)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    document = {
        "model": {"target": str(tiny_target), "dtype": "float32"},
        "data": {"train": [str(tmp_path / "rows.jsonl")]},
        "trainer": {"world": 2, "batch_size": 4, "accumulation": 2, "epochs": 5, "max_steps": 7},
        "flow": {"tail": "drop", "reuse_bytes": 1000},
        "deployment": {"output_dir": str(tmp_path / "runs")},
    }  # fmt: skip
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(document))

    def build(*overrides: str, runs: tuple[RunSnapshot, ...] = ()) -> SubmitRunRequest | None:
        recipe, directory = tmp_path / "recipe.yaml", tmp_path / "My Set"
        return recording.build_recording(recipe, list(overrides), directory, 1 << 20, runs, lambda line: None)

    return build


def test_whatever_the_recipe_trains_one_rank_records_every_prompt_once(build: Build, tmp_path: Path) -> None:
    request = build()
    assert request is not None
    config = parse_config(request.config_yaml)
    assert config.records
    assert (config.record.directory, config.record.shard_bytes) == (str(tmp_path / "My Set"), 1 << 20)
    trainer, flow = config.trainer, config.flow
    assert (trainer.world, trainer.batch_size, trainer.epochs, trainer.max_steps) == (1, 1, 1, 0)
    assert config.global_batch == 16
    assert (flow.tail, flow.reuse_bytes) == ("carry", 0)
    # A configuration that a person changed afterwards is refused.
    document = yaml.safe_load(request.config_yaml)
    document["trainer"]["epochs"] = 2
    with pytest.raises(ConfigError, match="epochs 2 = 1"):
        parse_config(yaml.safe_dump(document))


def test_an_unfinished_run_is_continued_and_a_finished_one_followed_by_the_next(build: Build) -> None:
    first = build()
    assert first is not None
    assert re.fullmatch(r"capture-my-set-[0-9a-f]{8}-1", first.run_id)
    for state, number in (("PAUSED", 1), ("FAILED", 2), ("CANCELLED", 2)):
        again = build(runs=(RunSnapshot(run_id=first.run_id, state=state),))
        assert again is not None
        assert again.run_id == f"{first.run_id[:-1]}{number}"


def test_a_disk_that_is_too_small_is_refused_with_the_numbers(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    request = build()
    assert request is not None
    tokens = int(PromptSet.open(request.prompt_set_uri).num_tokens.sum())
    needed = tokens * bytes_per_token(request.contract) + recording.SPARE_BYTES
    free = SimpleNamespace(free=needed)
    monkeypatch.setattr(recording.shutil, "disk_usage", lambda path: free)
    assert build() is not None
    free.free = needed - 1
    with pytest.raises(HostError, match=rf"SF-HOST-SPACE.*{tokens} tokens × {bytes_per_token(request.contract)} bytes"):
        build()


def test_a_place_that_holds_something_else_is_refused_before_a_run_begins(build: Build, tmp_path: Path) -> None:
    place = tmp_path / "My Set"
    place.write_text("notes")
    with pytest.raises(DataError, match=r"SF-FEATURES-OTHER.*is a file"):
        build()
    place.unlink()
    place.mkdir()
    (place / "config.json").write_text("{}")
    with pytest.raises(DataError, match=r"SF-FEATURES-OTHER.*it holds config\.json"):
        build()


def test_another_set_in_the_directory_is_refused_and_a_complete_one_is_done(build: Build, tmp_path: Path) -> None:
    request = build()
    assert request is not None
    write_feature_set(tmp_path / "My Set", request.contract, PromptSet.open(request.prompt_set_uri))
    assert build() is None
    with pytest.raises(DataError, match=r"SF-FEATURES-OTHER.*layers: expected"):
        build("strategy.layers=[1,3]")
    with pytest.raises(ConfigError, match="SF-RECORD-SOURCE"):
        build("data.source=features", f"data.features={tmp_path / 'My Set'}")
