"""Which token fills the empty slots, and which tokens never may."""

import json
from pathlib import Path
from typing import Any

import pytest

from specfleet.contracts.errors import ConfigError
from specfleet.target.mask_token import resolve_mask_token


def _target(path: Path, vocab_size: int = 12, **tokenizer: Any) -> Path:
    """Ten tokens t0 … t9; t0 ends text, t1 pads."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(
        json.dumps({"vocab_size": vocab_size, "hidden_size": 4, "num_hidden_layers": 1, "eos_token_id": 0})
    )
    vocabulary = {f"t{index}": index for index in range(10)}
    (path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": []}))
    (path / "tokenizer_config.json").write_text(
        json.dumps({"pad_token": "t1", "eos_token": {"content": "t0"}, **tokenizer})
    )
    return path


def _refused(*arguments: Any, **named: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve_mask_token(*arguments, **named)
    assert caught.value.code == "SF-CONFIG-MASK-TOKEN"
    return str(caught.value)


def test_order_of_sources(tmp_path: Path) -> None:
    plain = _target(tmp_path / "plain")
    assert resolve_mask_token(plain) == 10  # the first embedding row without a token
    assert resolve_mask_token(plain, draft=7) == 7
    assert resolve_mask_token(plain, explicit=5, draft=7) == 5
    masked = _target(tmp_path / "masked", mask_token={"content": "t9"})
    assert resolve_mask_token(masked) == 9
    assert resolve_mask_token(masked, explicit=9) == 9


def test_never_padding_end_or_outside(tmp_path: Path) -> None:
    target = _target(tmp_path / "target")
    assert "end token" in _refused(target, explicit=0)
    assert "padding" in _refused(target, explicit=1)
    assert "vocabulary of 12" in _refused(target, explicit=12)
    assert "outside" in _refused(target, explicit=-1)
    assert "padding" in _refused(_target(tmp_path / "padmask", mask_token="t1"))


def test_another_id_than_the_tokenizers_is_refused(tmp_path: Path) -> None:
    assert "SGLang refuses" in _refused(_target(tmp_path / "target", mask_token="t9"), explicit=5)


def test_no_candidate_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    message = _refused(_target(tmp_path / "full", vocab_size=10))
    assert "all 10 embedding rows" in message
    assert "strategy.mask_token_id" in message
    unread = _target(tmp_path / "unread")
    (unread / "tokenizer.json").unlink()
    assert "cannot be read" in _refused(unread)
    assert resolve_mask_token(unread, explicit=4) == 4


def test_added_tokens_and_unigram_vocabularies_count_as_used(tmp_path: Path) -> None:
    target = _target(tmp_path / "target", added_tokens_decoder={"10": {"content": "<x>"}})
    assert resolve_mask_token(target) == 11
    unigram = _target(tmp_path / "unigram")
    pieces = [[f"t{index}", -1.0] for index in range(11)]
    (unigram / "tokenizer.json").write_text(json.dumps({"model": {"vocab": pieces}, "added_tokens": []}))
    assert resolve_mask_token(unigram) == 11
