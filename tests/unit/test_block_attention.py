"""Block attention against a dense one written slot by slot, and who may see what."""

import pytest
import torch
from fixtures.block_attention import dense, small_case, with_gradients

from specfleet.drafts import block_attention as module
from specfleet.drafts.block_attention import block_attention, plan_spans

CASE = small_case()
PLACES = CASE.anchors_N, CASE.starts_N


@pytest.mark.parametrize("window", [None, 4, 6])
@pytest.mark.parametrize("span_blocks", [1, 2, 32])
def test_equals_dense_attention(window: int | None, span_blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SPAN_BLOCKS", span_blocks)
    tensors = CASE.tensors(torch.float64)
    found = with_gradients(block_attention(*tensors, *PLACES, window), tensors)
    for ours, theirs in zip(found, with_gradients(dense(CASE, tensors, window), tensors), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_close_to_dense_in_fp32() -> None:
    tensors = CASE.tensors(torch.float32)
    torch.testing.assert_close(block_attention(*tensors, *PLACES), dense(CASE, tensors, None), rtol=1e-5, atol=1e-5)


def test_visibility_of_the_specification() -> None:
    """T = 4, G = 2, anchors 1 and 3: slots of the first see {0, 4, 5}, of the second {0, 1, 2, 6, 7}; anchor 0 no context.

    One-hot values show exactly which keys had a weight.
    """
    slots, context = 2, 4
    anchors = torch.tensor([0, 1, 3])
    keys = context + slots * len(anchors)
    one_hot = torch.eye(keys, dtype=torch.float64)[:, None]
    q = torch.zeros(3, slots, 1, keys, dtype=torch.float64)
    block_v = one_hot[context:].view(3, slots, 1, keys)
    out = block_attention(
        q, torch.zeros_like(one_hot[:context]), one_hot[:context], torch.zeros_like(block_v), block_v,
        anchors, torch.zeros_like(anchors),
    )  # fmt: skip
    visible = [[set(row.nonzero().flatten().tolist()) for row in block[:, 0]] for block in out]
    assert visible == [[{4, 5}] * 2, [{0, 6, 7}] * 2, [{0, 1, 2, 8, 9}] * 2]


def test_sliding_window_of_the_specification() -> None:
    """w = 3, a = 5, G = 2: slot 0 sees context {3, 4} and itself, slot 1 {4} and both; w = 1 no context at all."""
    for window, expected in ((3, [{3, 4, 5}, {4, 5, 6}]), (1, [{5}, {5, 6}])):
        one_hot = torch.eye(7, dtype=torch.float64)[:, None]
        block_v, anchors = one_hot[5:].view(1, 2, 1, 7), torch.tensor([5])
        out = block_attention(
            torch.zeros(1, 2, 1, 7, dtype=torch.float64), torch.zeros_like(one_hot[:5]), one_hot[:5],
            torch.zeros_like(block_v), block_v, anchors, torch.zeros_like(anchors), window,
        )  # fmt: skip
        assert [set(row.nonzero().flatten().tolist()) for row in out[0, :, 0]] == expected


def test_hidden_keys_do_not_leak() -> None:
    """A key nobody may see can hold anything, and gets no gradient."""
    tensors = [tensor.detach().clone() for tensor in CASE.tensors(torch.float32)]
    clean = block_attention(*tensors, *PLACES)
    hidden = torch.tensor([7, 8, 9, 10, 11, 22, 23])  # behind each sequence's last anchor, and the empty sequence
    for index in (1, 2):
        tensors[index][hidden] = 1e30
        tensors[index].requires_grad_()
    found = block_attention(*tensors, *PLACES)
    assert torch.equal(found, clean)
    found.sum().backward()
    assert all(not tensors[index].grad[hidden].any() for index in (1, 2))  # type: ignore[index]


def test_spans_cover_every_block_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SPAN_BLOCKS", 2)
    assert plan_spans(*PLACES) == [
        (0, 2, 0, 0, 2),
        (2, 3, 0, 7, 7),
        (3, 5, 12, 0, 1),
        (5, 7, 12, 4, 8),
        (7, 8, 12, 10, 10),
    ]
    assert plan_spans(CASE.anchors_N[:0], CASE.starts_N[:0]) == []
