"""The serving benchmark's measurement of a real SGLang server, without a draft: a CPU serves that fast."""

from pathlib import Path

import pytest
from fixtures.gate_case import write_eval_set
from fixtures.sglang import sglang_python
from fixtures.tiny import make_tiny_target

from benchmarks.serving.measure import measure, server_options, start, stop
from specfleet.data.prompt_set import PromptSet
from specfleet.drafts.decode import decode_greedy
from specfleet.gate.rows import select_rows
from specfleet.target.hf import HFTarget

pytestmark = [pytest.mark.integration, pytest.mark.sglang, pytest.mark.timeout(300)]

NEW_TOKENS = 8


async def test_every_row_is_answered_and_counted(tmp_path: Path) -> None:
    target_dir = make_tiny_target(tmp_path / "target")
    target = HFTarget.load(target_dir, (1,), "float32")
    prompts = [[300, 12, 80] * 4, [17, 200, 33] * 4]
    expected = [decode_greedy(target, None, prompt, NEW_TOKENS, 0).ids for prompt in prompts]
    texts = [[*prompt, *ids] for prompt, ids in zip(prompts, expected, strict=True)]
    rows = select_rows(PromptSet.open(write_eval_set(tmp_path / "eval", target_dir, texts)), 0)
    options = server_options(target_dir, "cpu", "float32", 64, 2, 0.0, ())
    servers = await start(sglang_python(), {"plain": options}, tmp_path, graphs=False)
    try:
        sources, answers = await measure(servers["plain"].url, rows, NEW_TOKENS, concurrency=2)
    finally:
        await stop(servers)
    assert [item["ids"] for item in answers] == expected
    # Each source is asked twice the concurrency at least, so each of the two rows four times.
    assert sorted(sources) == ["alpha", "beta"]
    for counts in sources.values():
        assert (counts["requests"], counts["tokens"], counts["rounds"]) == (4, 4 * NEW_TOKENS, 0)
        assert counts["tokens_per_s"] > 0
