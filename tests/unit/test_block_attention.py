"""Attention of block drafts against a dense one written slot by slot, and who may see what."""

import pytest
import torch

from specfleet.drafts.block_attention import block_attention, plan_spans

COUNTS, STARTS = torch.tensor([3, 0, 5]), torch.tensor([0, 9, 12])
ANCHORS = torch.tensor([0, 2, 7, 0, 1, 4, 8, 10])
BLOCKS, SLOTS, HEADS, KV_HEADS, DIM, CONTEXT = 8, 4, 6, 2, 8, 24


def seen(anchor: int, slot: int, slots: int, window: int | None) -> tuple[list[int], list[int]]:
    """Context positions and slots of its own block that a slot attends to, straight from the definition."""
    context = [s for s in range(anchor) if window is None or s >= anchor + slot - (window - 1)]
    return context, list(range(slots if window is None else slot + 1))


def dense(
    q: torch.Tensor, ck: torch.Tensor, cv: torch.Tensor, bk: torch.Tensor, bv: torch.Tensor, window: int | None
) -> torch.Tensor:
    owner = torch.repeat_interleave(torch.arange(len(COUNTS)), COUNTS)
    rows = []
    for n, anchor in enumerate(ANCHORS.tolist()):
        for slot in range(q.shape[1]):
            context, own = seen(anchor, slot, q.shape[1], window)
            index = torch.tensor(context, dtype=torch.int64) + STARTS[owner[n]]
            keys = torch.cat((ck[index], bk[n, own])).repeat_interleave(HEADS // KV_HEADS, dim=1)
            values = torch.cat((cv[index], bv[n, own])).repeat_interleave(HEADS // KV_HEADS, dim=1)
            weights = torch.softmax(torch.einsum("hd,shd->hs", q[n, slot], keys) * DIM**-0.5, -1)
            rows.append(torch.einsum("hs,shd->hd", weights, values))
    return torch.stack(rows).view_as(q)


def _tensors(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [
        (BLOCKS, SLOTS, HEADS, DIM), (CONTEXT, KV_HEADS, DIM), (CONTEXT, KV_HEADS, DIM),
        (BLOCKS, SLOTS, KV_HEADS, DIM), (BLOCKS, SLOTS, KV_HEADS, DIM),
    ]  # fmt: skip
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("window", [None, 4, 6])
@pytest.mark.parametrize("span_blocks", [1, 2, 32])
def test_equals_dense_attention(window: int | None, span_blocks: int) -> None:
    tensors = _tensors(torch.float64)
    spans = plan_spans(ANCHORS, COUNTS, STARTS, span_blocks)
    found = block_attention(*tensors, ANCHORS, spans, window)
    expected = dense(*tensors, window)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for ours, theirs in zip(
        torch.autograd.grad((found * weights).sum(), tensors),
        torch.autograd.grad((expected * weights).sum(), tensors),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_close_to_dense_in_fp32() -> None:
    tensors = _tensors(torch.float32)
    spans = plan_spans(ANCHORS, COUNTS, STARTS)
    torch.testing.assert_close(block_attention(*tensors, ANCHORS, spans), dense(*tensors, None), rtol=1e-5, atol=1e-5)


def test_visibility_of_the_specification() -> None:
    """T = 4, G = 2, anchors 1 and 3: slots of the first see {0, 4, 5}, of the second {0, 1, 2, 6, 7}; anchor 0 no context.

    One-hot values show exactly which keys had a weight.
    """
    slots, context = 2, 4
    anchors, counts = torch.tensor([0, 1, 3]), torch.tensor([3])
    keys = context + slots * len(anchors)
    one_hot = torch.eye(keys, dtype=torch.float64)[:, None]
    q = torch.zeros(3, slots, 1, keys, dtype=torch.float64)
    block_v = one_hot[context:].view(3, slots, 1, keys)
    out = block_attention(
        q, torch.zeros_like(one_hot[:context]), one_hot[:context], torch.zeros_like(block_v), block_v,
        anchors, plan_spans(anchors, counts, torch.tensor([0])),
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
            torch.zeros_like(block_v), block_v, anchors, plan_spans(anchors, torch.tensor([1]), torch.tensor([0])), window,
        )  # fmt: skip
        assert [set(row.nonzero().flatten().tolist()) for row in out[0, :, 0]] == expected


def test_hidden_keys_do_not_leak() -> None:
    """A key nobody may see can hold anything, and gets no gradient."""
    tensors = [tensor.detach().clone() for tensor in _tensors(torch.float32)]
    spans = plan_spans(ANCHORS, COUNTS, STARTS)
    clean = block_attention(*tensors, ANCHORS, spans)
    hidden = torch.tensor([7, 8, 9, 10, 11, 22, 23])  # behind each sequence's last anchor, and the empty sequence
    for index in (1, 2):
        tensors[index][hidden] = 1e30
        tensors[index].requires_grad_()
    found = block_attention(*tensors, ANCHORS, spans)
    assert torch.equal(found, clean)
    found.sum().backward()
    assert all(not tensors[index].grad[hidden].any() for index in (1, 2))  # type: ignore[index]


def test_spans_cover_every_block_once() -> None:
    spans = plan_spans(ANCHORS, COUNTS, STARTS, span_blocks=2)
    assert spans.tolist() == [[0, 2, 0, 0, 2], [2, 3, 0, 7, 7], [3, 5, 12, 0, 1], [5, 7, 12, 4, 8], [7, 8, 12, 10, 10]]
    assert plan_spans(ANCHORS[:0], torch.tensor([0, 0]), torch.tensor([0, 0])).shape == (0, 5)
