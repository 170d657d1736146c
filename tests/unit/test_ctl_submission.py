"""A configuration on its way to services that run in other directories."""

from pathlib import Path

import pytest

from specfleet.config import parse_config
from specfleet.contracts.errors import SpecfleetError
from specfleet.ctl.submission import absolute_paths, submission


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
    bare = absolute_paths(parse_config("model: {target: nowhere}\ndata: {train: [a.jsonl]}\n"))
    assert (bare.model.target, bare.strategy.init_from, bare.data.features) == ("nowhere", "", "")


@pytest.mark.parametrize(
    ("strategy", "code"),
    [
        ("{name: eagle3, init_from: /nowhere/draft}", "SF-INIT-MISSING"),
        ("{name: dflash, layers: [1, 3], num_layers: 2, mask_token_id: 999999}", "SF-CONFIG-MASK-TOKEN"),
        # 2 is the end token.
        ("{name: peagle, mask_token_id: 2}", "SF-CONFIG-MASK-TOKEN"),
    ],
)
def test_a_draft_that_cannot_be_built_is_refused_before_the_fleet_is_asked(
    tmp_path: Path, tiny_target: Path, strategy: str, code: str
) -> None:
    text = f"model: {{target: {tiny_target}}}\ndata: {{train: [{tmp_path}/a.jsonl]}}\nstrategy: {strategy}\n"
    with pytest.raises(SpecfleetError) as caught:
        submission(absolute_paths(parse_config(text)))
    assert (caught.value.code, caught.value.exit_code) == (code, 2)
