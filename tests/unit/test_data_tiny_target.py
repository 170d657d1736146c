"""The shared tiny target is what other tests think it is."""

from pathlib import Path

from fixtures.tiny import make_tiny_target, make_tiny_tokenizer


def test_two_builds_are_byte_identical(tmp_path: Path) -> None:
    first, second = make_tiny_target(tmp_path / "a"), make_tiny_target(tmp_path / "b")
    names = sorted(p.name for p in first.iterdir())
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= set(names)
    assert all((first / name).read_bytes() == (second / name).read_bytes() for name in names)


def test_chatml_ids() -> None:
    tokenizer = make_tiny_tokenizer()
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, len(tokenizer)) == (0, 2, 384)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
