"""A configuration on its way to services that run in other directories."""

from pathlib import Path

import pytest

from specfleet.config import parse_config
from specfleet.ctl.submission import absolute_paths


def test_every_path_is_absolute_from_the_folder_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "target").mkdir()
    config = absolute_paths(
        parse_config(
            "model: {target: target}\ndata: {train: [a.jsonl], prompt_set: prompts}\nstrategy: {init_from: draft}\n"
            "gate: {eval: [b.jsonl]}\ndeployment: {output_dir: runs}\n"
        )
    )
    assert config.model.target == str(tmp_path / "target")
    assert (config.data.train, config.data.prompt_set) == ([str(tmp_path / "a.jsonl")], str(tmp_path / "prompts"))
    assert config.strategy.init_from == str(tmp_path / "draft")
    assert config.gate.eval == [str(tmp_path / "b.jsonl")]
    assert config.deployment.output_dir == str(tmp_path / "runs")
    # What is not named stays so.
    bare = absolute_paths(parse_config("model: {target: org/name}\ndata: {train: [a.jsonl]}\n"))
    assert (bare.model.target, bare.strategy.init_from, bare.data.features) == ("org/name", "", "")
