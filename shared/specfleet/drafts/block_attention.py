"""Attention of block drafts (DFlash and its descendants): each block sees the context before its anchor, and itself.

Slot j of the block anchored at position a sees context positions s < a, strictly: at inference the target's state of the
anchor does not exist yet. With a window w also s ≥ a + j − (w − 1). Inside the block all slots see one another; with a window
only earlier ones and themselves, as serving engines run such layers.

On a GPU this is a pair of fused kernels (kernels/block_attention.py). On a CPU the context part runs on torch's own kernel, a run
of blocks at a time, and the small part inside the blocks is merged into it by log-sum-exp. Either way memory is O(slots), and
context and blocks of different sequences never meet.

Shapes: N blocks of G slots, S context rows of all sequences one after another, n_q / n_kv heads (g = n_q / n_kv), d head size.
"""

from typing import Any, NamedTuple

import torch

from specfleet.drafts.lse_attention import attention_backward, attention_forward, bias_like

# Blocks of one kernel call on a CPU: with 16 slots and 4 query heads per key head, 2048 rows against up to T keys.
SPAN_BLOCKS = 32


class Span(NamedTuple):
    """Consecutive blocks first … last − 1 of one sequence, its first context row, and the smallest and largest anchor."""

    first: int
    last: int
    start: int
    smallest: int
    largest: int


def block_attention(
    q_NGnd: torch.Tensor,
    context_k_Snd: torch.Tensor,
    context_v_Snd: torch.Tensor,
    block_k_NGnd: torch.Tensor,
    block_v_NGnd: torch.Tensor,
    anchors_N: torch.Tensor,
    starts_N: torch.Tensor,
    window: int | None = None,
) -> torch.Tensor:
    """[N, G, n_q, d]. Keys and values have n_kv heads.

    anchors_N: positions, ascending within each sequence. starts_N: the context row where each block's sequence begins,
    ascending. Both int64, on the device of the rest.
    """
    tensors = (q_NGnd, context_k_Snd, context_v_Snd, block_k_NGnd, block_v_NGnd)
    if q_NGnd.is_cuda:
        # Imported here: only hosts with a GPU have Triton.
        from specfleet.drafts.kernels.block_attention import fused_block_attention

        return fused_block_attention(*tensors, anchors_N, starts_N, window)
    return _BlockAttention.apply(*tensors, anchors_N, plan_spans(anchors_N, starts_N), window)


def plan_spans(anchors_N: torch.Tensor, starts_N: torch.Tensor) -> list[Span]:
    """Runs of at most SPAN_BLOCKS blocks of one sequence that together cover every block once."""
    found, begin = [], 0
    for count in starts_N.unique_consecutive(return_counts=True)[1].tolist():
        for first in range(begin, begin + count, SPAN_BLOCKS):
            last = min(first + SPAN_BLOCKS, begin + count)
            found.append(Span(first, last, int(starts_N[first]), int(anchors_N[first]), int(anchors_N[last - 1])))
        begin += count
    return found


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, context_k: torch.Tensor, context_v: torch.Tensor, block_k: torch.Tensor,
        block_v: torch.Tensor, anchors: torch.Tensor, spans: list[Span], window: int | None,
    ) -> torch.Tensor:  # fmt: skip
        scale = q.shape[-1] ** -0.5
        wide = torch.promote_types(q.dtype, torch.float32)
        scores = _block_scores(q, block_k, scale, window)
        block_lse = scores.logsumexp(-1)
        block_out = torch.einsum("nhrs,nshd->nhrd", torch.exp(scores - block_lse[..., None]), block_v.to(wide))
        out_NhRd, lse_NhR = block_out, block_lse
        for span in spans:
            low = _low(span, window)
            if low == span.largest:
                continue
            blocks = slice(span.first, span.last)
            rows = _rows(q[blocks], context_k.shape[1])
            keys, values = _keys(context_k, span, low), _keys(context_v, span, low)
            visible = _visible(anchors[blocks], q.shape, context_k.shape[1], low, span.largest, window)
            out, lse, _ = attention_forward(rows, keys, values, scale, bias_like(rows, visible))
            # The kernel leaves rows that see nothing undefined.
            some = visible.any(-1).view(span.last - span.first, 1, -1)
            part_lse = torch.where(some, _unrows(lse[0].to(wide), span), -torch.inf)
            part_out = torch.where(some[..., None], _unrows(out[0], span), 0.0)
            merged = torch.logaddexp(lse_NhR[blocks], part_lse)
            out_NhRd[blocks] = (
                out_NhRd[blocks] * torch.exp(lse_NhR[blocks] - merged)[..., None]
                + part_out.to(wide) * torch.exp(part_lse - merged)[..., None]
            )
            lse_NhR[blocks] = merged
        result = out_NhRd.to(q.dtype)
        ctx.save_for_backward(q, context_k, context_v, block_k, block_v, anchors, result, lse_NhR)
        ctx.spans, ctx.window = spans, window
        return _slots(result, q)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, context_k, context_v, block_k, block_v, anchors, out_NhRd, lse_NhR = ctx.saved_tensors
        scale = q.shape[-1] ** -0.5
        wide, heads = lse_NhR.dtype, context_k.shape[1]
        grad = grads[0].contiguous()
        grad_NhRd, q_NhRd = _by_head(grad, heads).to(wide), _by_head(q, heads).to(wide)
        weights = torch.exp(_block_scores(q, block_k, scale, ctx.window) - lse_NhR[..., None])
        d_block_v = torch.einsum("nhrs,nhrd->nshd", weights, grad_NhRd)
        d_weights = torch.einsum("nhrd,nshd->nhrs", grad_NhRd, block_v.to(wide))
        d_scores = weights * (d_weights - (grad_NhRd * out_NhRd.to(wide)).sum(-1, keepdim=True)) * scale
        d_block_k = torch.einsum("nhrs,nhrd->nshd", d_scores, q_NhRd)
        dq_NhRd = torch.einsum("nhrs,nshd->nhrd", d_scores, block_k.to(wide))
        del weights, d_weights, d_scores, grad_NhRd, q_NhRd
        # Every run of blocks adds to the same context rows, so the sum is kept wide.
        dk, dv = context_k.new_zeros(context_k.shape, dtype=wide), context_v.new_zeros(context_v.shape, dtype=wide)
        for span in ctx.spans:
            low = _low(span, ctx.window)
            if low == span.largest:
                continue
            blocks = slice(span.first, span.last)
            rows, grad_rows = _rows(q[blocks], heads), _rows(grad[blocks], heads)
            out_rows = out_NhRd[blocks].transpose(0, 1).flatten(1, 2)[None]
            lse_rows = lse_NhR[blocks].transpose(0, 1).flatten(1, 2)[None]
            keys, values = _keys(context_k, span, low), _keys(context_v, span, low)
            bias = bias_like(rows, _visible(anchors[blocks], q.shape, heads, low, span.largest, ctx.window))
            part = attention_backward(grad_rows, rows, keys, values, out_rows, lse_rows, scale, (), bias)
            dq_NhRd[blocks] += _unrows(part[0][0], span)
            here = slice(span.start + low, span.start + span.largest)
            dk[here] += part[1][0].transpose(0, 1)
            dv[here] += part[2][0].transpose(0, 1)
        return (
            _slots(dq_NhRd.to(q.dtype), q), dk.to(context_k.dtype), dv.to(context_v.dtype),
            d_block_k.to(block_k.dtype), d_block_v.to(block_v.dtype), None, None, None,
        )  # fmt: skip


def _low(span: Span, window: int | None) -> int:
    """The first context position that a run looks at; its largest anchor ends what it looks at."""
    low = 0 if window is None else max(0, span.smallest - (window - 1))
    return min(low, span.largest)


def _visible(
    anchors_n: torch.Tensor, shape: torch.Size, kv_heads: int, low: int, high: int, window: int | None
) -> torch.Tensor:
    """[n·G·g, high − low] bool: which context positions each row of a run sees."""
    slots, groups = shape[1], shape[2] // kv_heads
    positions = torch.arange(low, high, device=anchors_n.device)
    visible = positions < anchors_n[:, None, None]
    if window is not None:
        first = anchors_n[:, None, None] + torch.arange(slots, device=anchors_n.device)[:, None] - (window - 1)
        visible = visible & (positions >= first)
    return visible[:, :, None].expand(-1, slots, groups, -1).flatten(0, 2)


def _block_scores(q_NGnd: torch.Tensor, k_NGnd: torch.Tensor, scale: float, window: int | None) -> torch.Tensor:
    """Scaled scores inside the blocks [N, n_kv, G·g, G], at least fp32; −inf where a windowed slot would look ahead."""
    wide = torch.promote_types(q_NGnd.dtype, torch.float32)
    slots, heads = k_NGnd.shape[1:3]
    scores = torch.einsum("nhrd,nshd->nhrs", _by_head(q_NGnd, heads).to(wide), k_NGnd.to(wide)) * scale
    if window is not None:
        slot = torch.arange(slots, device=q_NGnd.device)
        ahead = (slot > slot[:, None]).repeat_interleave(q_NGnd.shape[2] // heads, dim=0)
        scores.masked_fill_(ahead, -torch.inf)
    return scores


def _by_head(x_NGnd: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """[N, G, n_q, d] → [N, n_kv, G·g, d]: the query heads of one key head become rows, so no key is ever repeated."""
    return x_NGnd.unflatten(2, (kv_heads, -1)).transpose(1, 2).flatten(2, 3)


def _slots(x_NhRd: torch.Tensor, like_NGnd: torch.Tensor) -> torch.Tensor:
    """Inverse of _by_head."""
    return x_NhRd.unflatten(2, (like_NGnd.shape[1], -1)).transpose(1, 2).flatten(2, 3)


def _rows(x_nGnd: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """One run's slots as kernel rows [1, n_kv, n·G·g, d]."""
    return _by_head(x_nGnd, kv_heads).transpose(0, 1).flatten(1, 2)[None]


def _unrows(x_hR: torch.Tensor, span: Span) -> torch.Tensor:
    """[n_kv, n·G·g, …] → [n, n_kv, G·g, …]."""
    return x_hR.unflatten(1, (span.last - span.first, -1)).transpose(0, 1)


def _keys(x_Snd: torch.Tensor, span: Span, low: int) -> torch.Tensor:
    """A run's context positions from low on as [1, n_kv, keys, d]."""
    return x_Snd[span.start + low : span.start + span.largest].transpose(0, 1)[None]
