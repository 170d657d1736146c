"""The run configuration: what it refuses, with which words, and that it needs neither torch nor transformers."""

import subprocess
import sys
from pathlib import Path

import pytest

from specfleet.config import RunConfig, dump_config, load_config, parse_config
from specfleet.config.features import dflash_layers, eagle3_layers, feature_request, total_steps
from specfleet.contracts.errors import EXIT_BAD_INPUT, ConfigError, ContractError
from specfleet.coordinator.validate import check_resume

BASE = "model: {target: t}\ndata: {train: [a.jsonl]}\n"


def refusal(text: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        parse_config(BASE + text)
    assert caught.value.exit_code == EXIT_BAD_INPUT
    return caught.value


@pytest.mark.parametrize("name", ["eagle3", "peagle", "dflash", "domino", "dspark"])
def test_what_is_written_reads_back_equal(name: str) -> None:
    config = parse_config(BASE + f"strategy: {{name: {name}}}")
    assert config.strategy.name == name
    assert parse_config(dump_config(config)) == config


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("trainer: {batchsize: 4}", ["trainer.batchsize", "did you mean 'batch_size'?"]),
        ("strategy: {ttt_lenth: 3}", ["'strategy.ttt_lenth'", "did you mean 'ttt_length'?"]),
        ("strategy: {name: dspark, markov_rnk: 3}", ["'strategy.markov_rnk'", "did you mean 'markov_rank'?"]),
        ("flw: {}", ["'flw'", "did you mean 'flow'?"]),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_name(text: str, words: list[str]) -> None:
    error = refusal(text)
    assert error.code == "SF-CONFIG-UNKNOWN-KEY"
    assert all(word in error.message for word in words), error.message


def test_a_key_of_another_strategy_names_the_strategies_that_have_it() -> None:
    error = refusal("strategy: {name: dflash, ttt_length: 3}")
    assert error.code == "SF-CONFIG-UNKNOWN-KEY"
    assert "'strategy.ttt_length'; it belongs to eagle3, and the strategy is dflash" in error.message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("trainer: 1", "trainer: must be a mapping of keys to values (got 1)"),
        ("strategy: dflash", "strategy: must be a mapping with a name, as in {name: eagle3} (got 'dflash')"),
        ("gate: {eval: a.jsonl}", "gate.eval: must be a list, as in [first, second] (got 'a.jsonl')"),
        ("trainer: {lr: .inf}", "trainer.lr"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_in_plain_words(text: str, words: str) -> None:
    error = refusal(text)
    assert error.code == "SF-CONFIG-INVALID"
    assert words in error.message


def test_an_unknown_strategy_is_refused_with_the_nearest_name() -> None:
    error = refusal("strategy: {name: dflsh}")
    assert "there is no strategy 'dflsh'" in error.message
    assert "did you mean 'dflash'?" in error.message


@pytest.mark.parametrize(("source", "features"), [("features", ""), ("prompts", "/sets/a")])
def test_a_feature_set_is_named_exactly_when_it_is_the_source(source: str, features: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(f"model: {{target: t}}\ndata: {{train: [a.jsonl], source: {source}, features: '{features}'}}\n")
    assert f"data.source is '{source}' and data.features is '{features}'" in caught.value.message
    offline = parse_config("model: {target: t}\ndata: {source: features, features: /sets/a}\n")
    assert parse_config(dump_config(offline)) == offline


def test_a_window_larger_than_the_marks_shows_every_number() -> None:
    error = refusal("trainer: {world: 2, batch_size: 8, accumulation: 3}\nflow: {high_samples: 40, low_samples: 20}")
    for part in ("high_samples (40)", "48 samples", "world 2", "batch_size 8", "accumulation 3", "at least 48"):
        assert part in error.message, error.message


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("flow: {high_samples: 64, low_samples: 65}", ["65", "64"]),
        ("flow: {high_bytes: 10, low_bytes: 11}", ["11", "10"]),
        ("flow: {reuse_bytes: 5, retain: until_checkpoint}", ["5", "until_checkpoint"]),
        ("strategy: {name: peagle, keep_ratio: 0.3, keep_ratio_min: 0.4}", ["0.4", "0.3"]),
        ("strategy: {name: dflash, block_size: 16, sliding_window: 8}", ["8", "16"]),
        ("strategy: {head: target}", ["32000"]),
    ],
)
def test_contradicting_fields_are_both_named(text: str, numbers: list[str]) -> None:
    message = refusal(text).message
    assert all(number in message for number in numbers), message


def test_files_extend_one_another_and_overrides_win(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(BASE + "trainer: {lr: 0.5, epochs: 3}\n")
    (tmp_path / "run.yaml").write_text("extends: base.yaml\ntrainer: {epochs: 4}\n")
    config = load_config(tmp_path / "run.yaml", ["trainer.batch_size=2", "data.filter={split: [dev]}"])
    assert (config.trainer.lr, config.trainer.epochs, config.trainer.batch_size) == (0.5, 4, 2)
    assert config.data.filter == {"split": ["dev"]}
    assert load_config(tmp_path / "run.yaml", ["data.filter={split: [dev]}", "data.filter={}"]).data.filter == {}


def test_extends_in_a_circle_a_missing_file_and_a_bad_override(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("extends: b.yaml\n")
    (tmp_path / "b.yaml").write_text("extends: a.yaml\n")
    with pytest.raises(ConfigError, match="circle"):
        load_config(tmp_path / "a.yaml")
    with pytest.raises(ConfigError, match=r"nowhere\.yaml does not exist"):
        load_config(tmp_path / "nowhere.yaml")
    (tmp_path / "c.yaml").write_text(BASE)
    with pytest.raises(ConfigError, match=r"not of the form section\.key=value"):
        load_config(tmp_path / "c.yaml", ["trainer.lr"])
    with pytest.raises(ConfigError, match=r"override 'data\.train=\[a\.jsonl' is not YAML") as caught:
        load_config(tmp_path / "c.yaml", ["data.train=[a.jsonl"])
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("tail", "epochs", "max_steps", "steps"),
    [("drop", 2, 0, 4), ("pad", 2, 0, 6), ("carry", 2, 0, 5), ("carry", 2, 3, 3), ("carry", 1, 99, 3)],
)
def test_steps_of_a_run(tail: str, epochs: int, max_steps: int, steps: int) -> None:
    text = f"trainer: {{batch_size: 4, epochs: {epochs}, max_steps: {max_steps}}}\nflow: {{tail: {tail}}}"
    assert total_steps(parse_config(BASE + text), num_prompts=10) == steps


@pytest.mark.parametrize(
    ("num_layers", "expected"),
    [
        (24, (1, 6, 11, 16, 21)), (28, (1, 7, 13, 19, 25)), (30, (1, 8, 14, 20, 27)), (32, (1, 8, 15, 22, 29)),
        (36, (1, 9, 17, 25, 33)), (48, (1, 12, 23, 34, 45)), (64, (1, 16, 31, 46, 61)),
    ],
)  # fmt: skip
def test_default_layers(num_layers: int, expected: tuple[int, ...]) -> None:
    assert dflash_layers(num_layers, 5) == expected
    assert eagle3_layers(36) == (1, 17, 32)
    assert eagle3_layers(6) == (0, 2, 4)


@pytest.mark.parametrize("layers", [[1, 29], [1, 1], [5, 2], []])
def test_layers_out_of_range_repeated_or_unordered_are_refused(layers: list[int]) -> None:
    section = parse_config(BASE + f"strategy: {{layers: {layers}}}").strategy
    with pytest.raises(ConfigError) as caught:
        feature_request(section, num_hidden_layers=30)
    assert caught.value.code == "SF-CONFIG-LAYERS"
    assert str(layers) in caught.value.message


def resumed(old: str, new: str) -> None:
    check_resume(parse_config(BASE + old), parse_config(BASE + new))


def test_resume_as_another_strategy_or_with_another_mask_token_shows_both_values() -> None:
    with pytest.raises(ContractError) as caught:
        resumed("strategy: {name: dflash, mask_token_id: 3}", "strategy: {name: dflash, mask_token_id: 4}")
    assert caught.value.code == "SF-RUN-IDENTITY"
    assert "mask_token_id" in caught.value.message
    assert "3" in caught.value.message
    assert "4" in caught.value.message
    with pytest.raises(ContractError) as caught:
        resumed("strategy: {name: eagle3}", "strategy: {name: dflash}")
    assert caught.value.exit_code == EXIT_BAD_INPUT
    assert "eagle3" in caught.value.message
    assert "dflash" in caught.value.message


def test_resume_with_another_learning_rate_is_fine() -> None:
    resumed("trainer: {lr: 0.1}", "trainer: {lr: 0.2}")
    assert isinstance(parse_config(BASE), RunConfig)


def test_the_slim_rooms_import_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; import specfleet.config, specfleet.config.features, specfleet.contracts.capture, specfleet.bus.factory, "
        "specfleet.store.factory, specfleet.features.verify, specfleet.policies.windows, specfleet.coordinator.app; "
        "import specfleet.target.facts; "
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
