"""The demo's real target: converted once, and it says what the packaged conversations say it said.

Downloads a 93 MB package on a machine that has not run the demo yet.
"""

from pathlib import Path

import pytest
import torch

from specfleet.data.conversation import Conversation
from specfleet.data.demo import demo_conversations, demo_recipe, demo_target_dir
from specfleet.data.prepare import PrepareOptions, prepare_prompt_set
from specfleet.data.render import ChatRenderer
from specfleet.data.sources import Reading, iter_conversations, iter_rows
from specfleet.target.facts import read_target_facts

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def target() -> Path:
    return demo_target_dir()


@pytest.fixture(scope="module")
def rows() -> list[Conversation]:
    return list(iter_conversations([demo_conversations()], Reading(), {}))


@pytest.fixture(scope="module")
def messages() -> list[list[dict[str, str]]]:
    return [row["messages"] for _, row in iter_rows(demo_conversations())]


def test_facts(target: Path) -> None:
    facts = read_target_facts(target)
    assert (facts.hidden_size, facts.num_hidden_layers, facts.vocab_size) == (576, 30, 49_152)
    assert (facts.dtype, facts.eos_token_ids, facts.tie_word_embeddings) == ("bfloat16", (2,), True)
    assert facts.architecture == "LlamaForCausalLM"
    assert demo_target_dir() == target


def test_tokenizer_and_template_give_the_prompts_the_answers_were_generated_from(
    target: Path, rows: list[Conversation], messages: list[list[dict[str, str]]]
) -> None:
    renderer = ChatRenderer.load(target, 49_152, [2])
    texts = [renderer.prompt_text(turns[:-1]) for turns in messages]
    encodings = renderer.tokenizer(texts, add_special_tokens=False)["input_ids"]
    assert [list(ids) for ids in encodings] == [row.prompt_token_ids for row in rows]


def test_the_recipe_gives_the_prompt_set_its_comments_promise(target: Path, tmp_path: Path) -> None:
    from specfleet.config import load_config

    config = load_config(demo_recipe())
    found = prepare_prompt_set(config.data.train, target, tmp_path, PrepareOptions.from_section(config.data))
    assert len(found) == 300
    assert found.manifest["counts"]["tokens"] == int(found.num_tokens.sum()) < 65_000
    assert found.manifest["flags"]["from_token_ids"] == 300
    assert list(found.manifest["splits"]) == ["train"]


def test_it_answers_greedily_as_recorded(target: Path, rows: list[Conversation]) -> None:
    """bf16 arithmetic differs between machines, so near-ties may fall the other way: whole answers are compared by
    teacher forcing, where one such token does not change the rest, and the start of one of them by generating."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16).eval()
    held_out = [row for row in rows if row.split == "dev" and row.finish == "stop"]
    held_out.sort(key=lambda row: len(row.prompt_token_ids or []))
    agree = total = 0
    starts: list[int] = []
    for row in held_out[:6]:
        prompt, answer = row.prompt_token_ids or [], row.response_token_ids or []
        with torch.no_grad():
            logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        same = logits.argmax(-1) == torch.tensor(answer)
        agree, total = agree + int(same.sum()), total + len(answer)
        starts.append(int(same.int().cumprod(0).sum()))
    assert agree / total > 0.95
    best = max(range(len(starts)), key=starts.__getitem__)
    assert starts[best] >= 20
    prompt, answer = held_out[best].prompt_token_ids or [], held_out[best].response_token_ids or []
    out = model.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)[0, len(prompt) :].tolist()
    assert out == answer[:20]
