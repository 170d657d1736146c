"""On the demo's real target: training logits equal decoding logits, and decoding with a draft is lossless.

And on the tiny target: a draft that overfits one greedy answer is accepted to the last guess.
"""

from pathlib import Path

import pytest
import torch
from fixtures.eagle3 import LAYERS, tiny_draft, tiny_strategy

from specfleet.config.features import eagle3_layers
from specfleet.contracts.errors import HostError
from specfleet.data.demo import demo_target_dir
from specfleet.drafts.acceptance import TextRow, offline_acceptance
from specfleet.drafts.decode import decode_greedy
from specfleet.drafts.eagle3 import Eagle3Draft
from specfleet.target.hf import HFTarget

pytestmark = pytest.mark.integration

STEPS = 7


@pytest.fixture(scope="module")
def target() -> HFTarget:
    """SmolLM2-135M-Instruct in fp32."""
    try:
        path = demo_target_dir()
    except HostError as error:
        pytest.skip(f"the demo target is not available: {error}")
    return HFTarget.load(path, eagle3_layers(30), dtype="float32", final_state="none")


@pytest.fixture(scope="module")
def draft(target: HFTarget) -> Eagle3Draft:
    """Untrained, in the demo's sizes: nine query heads in groups of three, rotary base 1e5."""
    torch.manual_seed(0)
    draft = Eagle3Draft.from_config(
        {
            "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3,
            "head_dim": 64, "vocab_size": 49152, "draft_vocab_size": 2048, "target_hidden_size": 576,
            "layer_ids": list(target.layers), "max_position_embeddings": 8192, "rope_theta": 1e5,
        }
    )  # fmt: skip
    return draft.eval()


# A ChatML user turn; what it says does not matter.
PROMPT = [1, 4093, 198, 5345, 1296, 7040, 30, 2, 198, 1, 520, 9531, 198]


@torch.no_grad()
def test_training_logits_equal_decoding_logits(target: HFTarget, draft: Eagle3Draft) -> None:
    text = PROMPT + torch.randint(3, 49152, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    captured = target.capture([text])[0]
    assert isinstance(captured, dict)
    aux = captured["aux_states"]
    rows = torch.arange(len(PROMPT) - 1, len(PROMPT) + 23)
    outputs = draft.rollout(torch.tensor([text]), aux[None], target.embedding_VH, [rows] * STEPS)
    trained = torch.stack([draft.logits(output) for output in outputs], dim=1)
    drafter = draft.drafter(target.embedding_VH)
    done = 0
    for place, t in enumerate(rows.tolist()):
        drafter.extend(text[done + 1 : t + 2], aux[done : t + 1])
        done = t + 1
        _, decoded = drafter.chain(STEPS, forced=text[t + 2 : t + 2 + STEPS])
        torch.testing.assert_close(trained[place], torch.stack(decoded), rtol=0, atol=1e-4)


def test_decoding_with_a_draft_is_lossless(target: HFTarget, draft: Eagle3Draft) -> None:
    plain = decode_greedy(target, None, PROMPT, 12, 0)
    assert decode_greedy(target, draft.drafter(target.embedding_VH), PROMPT, 12, 3).ids == plain.ids


def test_a_draft_that_overfits_one_answer_is_accepted_completely(tiny_target: Path) -> None:
    k = 4
    target = HFTarget.load(tiny_target, LAYERS, dtype="float32")
    prompt = [300, 12, 12, 80, 33, 6]
    answer = decode_greedy(target, None, prompt, 48, 0).ids
    text = prompt + answer
    captured = target.capture([text])[0]
    assert isinstance(captured, dict)
    draft = tiny_draft(seed=1, draft_vocab_size=384)
    # A head eight times larger has the same argmax and is far surer of it: nothing hangs on near-ties.
    strategy = tiny_strategy(draft, target.embedding_VH, 8 * target.head_VH, ttt_length=k, step_decay=1.0)
    mask = torch.tensor([0] * len(prompt) + [1] * len(answer), dtype=torch.uint8)
    batch = strategy.collate([{"input_ids": torch.tensor(text, dtype=torch.int32), "loss_mask": mask, **captured}])
    prepared = strategy.prepare(batch)
    row = TextRow(text, len(prompt))
    before = offline_acceptance([row], target, draft, k)[0]
    optimizer = torch.optim.AdamW(draft.parameters(), lr=5e-3)
    for _ in range(250):
        loss = torch.stack(list(strategy.objective(prepared).numerators.values())).sum() / len(answer)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    decoded = decode_greedy(target, draft.drafter(target.embedding_VH), prompt, len(answer), k)
    assert decoded.ids == answer
    # Every round but the last, which the limit may cut, commits all k guesses and the target's own token.
    assert set(decoded.committed[:-1]) == {k + 1}
    assert before.length < 2.0
    assert offline_acceptance([row], target, draft, k)[0].length == pytest.approx(decoded.acceptance_length)
