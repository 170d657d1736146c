"""A real SGLang server answers conversations anew on a CPU: the ids are the target's greedy ones, and training sees them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fixtures.sglang import sglang_python
from fixtures.tiny import make_tiny_target, make_tiny_tokenizer
from safetensors.torch import load_file, save_file

from specfleet.contracts.errors import ContractError
from specfleet.data.prepare import prepare_prompt_set
from specfleet.data.regenerate.endpoint import Endpoint
from specfleet.data.regenerate.engines import OpenAIEngine, Sampling, SglangEngine
from specfleet.data.regenerate.run import regenerate
from specfleet.drafts.decode import decode_greedy
from specfleet.sglang.launch import Server, ServerOptions
from specfleet.target.hf import HFTarget

pytestmark = [pytest.mark.integration, pytest.mark.sglang, pytest.mark.timeout(600)]

SAMPLING = Sampling(max_tokens=16)


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ends some of its answers: where it would say token 79, it now stops."""
    directory = make_tiny_target(tmp_path_factory.mktemp("target"))
    tensors = load_file(directory / "model.safetensors")
    embedding_VH = tensors["model.embed_tokens.weight"]
    embedding_VH[2] = 1.05 * embedding_VH[79]
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def write_chats(path: Path) -> Path:
    chats = [
        ["What is the answer?"],
        ["Hello!", "How are you today?"],
        ["def add(a, b):"],
        ["x" * 900],
        ["The capital of Japan"],
    ]
    rows = [
        {"id": f"c{index}", "license": "MIT", "messages": [{"role": "user", "content": text} for text in turns]}
        for index, turns in enumerate(chats)
    ]
    # The old answer between two questions is thrown away.
    rows[1]["messages"].insert(1, {"role": "assistant", "content": "Hi."})  # type: ignore[attr-defined]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def answers(row: dict[str, Any]) -> list[tuple[list[int], list[int]]]:
    """(prompt, answer) ids of every turn of a row."""
    ids = row["prompt_token_ids"] + row["response_token_ids"]
    mask = [0] * len(row["prompt_token_ids"]) + row.get("response_loss_mask", [1] * len(row["response_token_ids"]))
    starts = [i for i, m in enumerate(mask) if m and not mask[i - 1]]
    stops = [i for i, m in enumerate(mask, 1) if m and (i == len(mask) or not mask[i])]
    return [(ids[:first], ids[first:stop]) for first, stop in zip(starts, stops, strict=True)]


async def test_regenerate_with_sglang(target_dir: Path, tmp_path: Path) -> None:
    chats, out = write_chats(tmp_path / "chats.jsonl"), tmp_path / "out.jsonl"
    server = Server(
        sglang_python(),
        ServerOptions(target_dir, "cpu", "float32", context_length=256, pool_tokens=2048),
        tmp_path / "sglang.log",
    )
    await server.start()
    try:
        async with Endpoint(server.url) as endpoint:
            engine = await SglangEngine.connect(endpoint, target_dir, "", SAMPLING)
            result = await regenerate([chats], engine, SAMPLING, out)
            whole = out.read_bytes()
            # What a kill leaves: some rows and half of one.
            out.write_bytes(whole[: len(whole) // 2])
            resumed = await regenerate([chats], engine, SAMPLING, out, concurrency=1)
            assert out.read_bytes() == whole
            assert 0 < resumed.new_rows < result.new_rows
            chat = await OpenAIEngine.connect(endpoint, "", SAMPLING)
            by_text = await regenerate([chats], chat, SAMPLING, tmp_path / "text.jsonl")
            other = tmp_path / "other"
            other.mkdir()
            (other / "config.json").write_bytes((target_dir / "config.json").read_bytes())
            make_tiny_tokenizer(320).save_pretrained(other)
            with pytest.raises(ContractError) as error:
                await SglangEngine.connect(endpoint, other, "", SAMPLING)
            assert error.value.code == "SF-REGEN-TARGET"
    finally:
        await server.stop()

    rows = [json.loads(line) for line in whole.splitlines()]
    assert [row["id"] for row in rows] == ["c1", "c2", "c4"]
    # c0 is answered with nothing but the stop token; the prompt of c3 exceeds the context.
    assert result.rejects == {"empty_answer": 1, "endpoint_refused": 1}
    target = HFTarget.load(target_dir, (1,), "float32")
    turns = 0
    for row in rows:
        for prompt, answer in answers(row):
            assert answer == decode_greedy(target, None, prompt, SAMPLING.max_tokens, 0, target.facts.eos_token_ids).ids
            turns += 1
    assert turns == 4
    assert result.rows_with_token_ids == 3
    assert result.finish == {"stop": 2, "length": 1}
    assert result.finish == by_text.finish
    text_rows = [json.loads(line) for line in (tmp_path / "text.jsonl").read_text().splitlines()]
    assert [row["messages"] for row in text_rows] == [row["messages"] for row in rows]
    assert "response_token_ids" not in text_rows[0]

    prompt_set = prepare_prompt_set([out], target_dir, tmp_path / "sets")
    prompts = [prompt for batch in prompt_set.iter_batches(8) for prompt in batch]
    assert [list(p.input_ids) for p in prompts] == [row["prompt_token_ids"] + row["response_token_ids"] for row in rows]


def test_the_command_serves_the_target_itself(target_dir: Path, tmp_path: Path) -> None:
    chats, out = write_chats(tmp_path / "chats.jsonl"), tmp_path / "answers.jsonl"
    command = [
        sys.executable, "-m", "specfleet.ctl", "data", "regenerate", str(chats), "--out", str(out), "--target",
        str(target_dir), "--max-tokens", "4", "--max-samples", "2", "--json",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rows_with_token_ids"] == 1
    (row,) = [json.loads(line) for line in out.read_text().splitlines()]
    assert row["regenerated"]["model"] == target_dir.name
    assert row["license"] == "MIT"
    assert row["response_loss_mask"][:2] == [1, 1]
