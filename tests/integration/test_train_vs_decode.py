"""On the demo's real target: training logits equal decoding logits, and decoding with a draft is lossless."""

import pytest
import torch

from specfleet.config.features import eagle3_layers
from specfleet.contracts.errors import HostError
from specfleet.data.demo import demo_target_dir
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
