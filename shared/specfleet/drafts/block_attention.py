"""Attention of block drafts (DFlash and its descendants): each block sees the context before its anchor, and itself.

Slot j of the block anchored at position a sees context positions s < a, strictly: at inference the target's state of the
anchor does not exist yet. With a window w also s ≥ a + j − (w − 1). Inside the block all slots see one another; with a window
only earlier ones and themselves, as serving engines run such layers.

The context part runs on torch's fused kernels, a run of blocks at a time; the small part inside the blocks is merged into it
by log-sum-exp. Memory is O(slots), the only mask that exists is that of one run, and context and blocks of different
sequences never meet.

Shapes: N blocks of G slots, S context rows of all sequences one after another, n_q / n_kv heads (g = n_q / n_kv), d head size.
"""

from typing import Any

import torch

from specfleet.drafts.lse_attention import Extra, attention_backward, attention_forward, bias_like

# Blocks of one kernel call: with 16 slots and 4 query heads per key head, 2048 rows against up to T keys.
SPAN_BLOCKS = 32


def plan_spans(
    anchors_N: torch.Tensor, counts_B: torch.Tensor, starts_B: torch.Tensor, span_blocks: int = SPAN_BLOCKS
) -> torch.Tensor:
    """Runs of consecutive blocks of one sequence: int64 [C, 5] on the CPU.

    Columns: first block, one past the last, first context row of the sequence, smallest and largest anchor of the run.
    anchors_N: positions, ascending within each sequence, on the CPU. counts_B: blocks per sequence (zero is fine).
    starts_B: the sequence's first context row.
    """
    runs = -(-counts_B // span_blocks)
    owner = torch.repeat_interleave(torch.arange(len(counts_B)), runs)
    nth = torch.arange(len(owner)) - (runs.cumsum(0) - runs)[owner]
    first = (counts_B.cumsum(0) - counts_B)[owner] + nth * span_blocks
    last = torch.minimum(first + span_blocks, counts_B.cumsum(0)[owner])
    return torch.stack((first, last, starts_B[owner], anchors_N[first], anchors_N[last - 1]), dim=1)


def block_attention(
    q_NGnd: torch.Tensor,
    context_k_Snd: torch.Tensor,
    context_v_Snd: torch.Tensor,
    block_k_NGnd: torch.Tensor,
    block_v_NGnd: torch.Tensor,
    anchors_N: torch.Tensor,
    spans_C5: torch.Tensor,
    window: int | None = None,
) -> torch.Tensor:
    """[N, G, n_q, d]. Keys and values have n_kv heads. spans_C5: see `plan_spans`; together they cover every block once."""
    return _BlockAttention.apply(
        q_NGnd, context_k_Snd, context_v_Snd, block_k_NGnd, block_v_NGnd, anchors_N, spans_C5.tolist(), window
    )


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, context_k: torch.Tensor, context_v: torch.Tensor, block_k: torch.Tensor,
        block_v: torch.Tensor, anchors: torch.Tensor, spans: list[list[int]], window: int | None,
    ) -> torch.Tensor:  # fmt: skip
        scale = q.shape[-1] ** -0.5
        wide = torch.promote_types(q.dtype, torch.float32)
        scores = _block_scores(q, block_k, scale, window)
        block_lse = scores.logsumexp(-1)
        block_out = torch.einsum("nhrs,nshd->nhrd", torch.exp(scores - block_lse[..., None]), block_v.to(wide))
        out_NhRd, lse_NhR = block_out, block_lse
        extras: list[list[Extra]] = []
        for span in spans:
            blocks = slice(span[0], span[1])
            rows = _rows(q[blocks], context_k.shape[1])
            extras.append([])
            for low, high, masked in _parts(span, q, window):
                visible = _visible(anchors[blocks], q.shape, context_k.shape[1], low, high, window) if masked else None
                keys, values = _keys(context_k, span[2], low, high), _keys(context_v, span[2], low, high)
                bias = None if visible is None else bias_like(rows, visible)
                out, lse, extra = attention_forward(rows, keys, values, scale, bias)
                extras[-1].append(extra)
                part_out, part_lse = _unrows(out[0], span), _unrows(lse[0].to(wide), span)
                if visible is not None:
                    # Kernels leave rows that see nothing undefined.
                    some = visible.any(-1).view(span[1] - span[0], 1, -1)
                    part_lse = torch.where(some, part_lse, -torch.inf)
                    part_out = torch.where(some[..., None], part_out, 0.0)
                merged = torch.logaddexp(lse_NhR[blocks], part_lse)
                out_NhRd[blocks] = (
                    out_NhRd[blocks] * torch.exp(lse_NhR[blocks] - merged)[..., None]
                    + part_out.to(wide) * torch.exp(part_lse - merged)[..., None]
                )
                lse_NhR[blocks] = merged
        result = out_NhRd.to(q.dtype)
        ctx.save_for_backward(q, context_k, context_v, block_k, block_v, anchors, result, lse_NhR)
        ctx.spans, ctx.window, ctx.extras = spans, window, extras
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
        for span, extras in zip(ctx.spans, ctx.extras, strict=True):
            blocks = slice(span[0], span[1])
            rows, grad_rows = _rows(q[blocks], heads), _rows(grad[blocks], heads)
            out_rows = out_NhRd[blocks].transpose(0, 1).flatten(1, 2)[None]
            lse_rows = lse_NhR[blocks].transpose(0, 1).flatten(1, 2)[None]
            for (low, high, masked), extra in zip(_parts(span, q, ctx.window), extras, strict=True):
                visible = _visible(anchors[blocks], q.shape, heads, low, high, ctx.window) if masked else None
                keys, values = _keys(context_k, span[2], low, high), _keys(context_v, span[2], low, high)
                bias = None if visible is None else bias_like(rows, visible)
                part = attention_backward(grad_rows, rows, keys, values, out_rows, lse_rows, scale, extra, bias)
                dq_NhRd[blocks] += _unrows(part[0][0], span)
                here = slice(span[2] + low, span[2] + high)
                dk[here] += part[1][0].transpose(0, 1)
                dv[here] += part[2][0].transpose(0, 1)
        return (
            _slots(dq_NhRd.to(q.dtype), q), dk.to(context_k.dtype), dv.to(context_v.dtype),
            d_block_k.to(block_k.dtype), d_block_v.to(block_v.dtype), None, None, None,
        )  # fmt: skip


def _parts(span: list[int], q: torch.Tensor, window: int | None) -> list[tuple[int, int, bool]]:
    """Context positions a run looks at: (low, high, must be masked). On CUDA the part that all its blocks see is split off,
    because flash attention takes no mask and is much faster than the kernel that does."""
    _, _, _, smallest, largest = span
    low = 0 if window is None else max(0, smallest - (window - 1))
    if largest <= low:
        return []
    if window is None and q.is_cuda and smallest > 0:
        return [(0, smallest, False), *([(smallest, largest, True)] if largest > smallest else [])]
    return [(low, largest, True)]


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


def _unrows(x_hR: torch.Tensor, span: list[int]) -> torch.Tensor:
    """[n_kv, n·G·g, …] → [n, n_kv, G·g, …]."""
    return x_hR.unflatten(1, (span[1] - span[0], -1)).transpose(0, 1)


def _keys(x_Snd: torch.Tensor, start: int, low: int, high: int) -> torch.Tensor:
    """Context positions low … high−1 of one sequence as [1, n_kv, keys, d]."""
    return x_Snd[start + low : start + high].transpose(0, 1)[None]
