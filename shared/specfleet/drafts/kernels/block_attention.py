"""Block attention as fused Triton kernels: one for the forward pass, one for the queries' gradient, one for the keys'.

Semantics and layouts: specfleet.drafts.block_attention. All query heads of one key head work on the same keys, so a program has
one key head, and its rows are (block, slot, head of the group), numbered r = (n·G + j)·g + i. A row sees one interval of context
keys and one of block keys. Anchors ascend inside a sequence and sequences lie one after another, so both ends of the context
interval never fall from row to row: a tile of rows streams one run of keys, and a tile of keys is seen by one run of blocks. No
mask is stored, nothing is added up by atomics, and results do not depend on scheduling.

Softmax runs online in fp32 and in base 2 (Dao, FlashAttention-2, arXiv 2307.08691). The backward pass recomputes
P = 2^(s − lse) and uses dS = P ⊙ (dO·Vᵀ − δ) with δ = Σ dO ⊙ O.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

_LOG2_E = tl.constexpr(1.4426950408889634)


class Tiles(NamedTuple):
    """Tile sizes: rows and keys of the forward pass; what a program of the backward pass keeps, and what it streams."""

    rows: int
    keys: int
    kept: int
    streamed: int


# By head size, padded to a power of two. What a program holds stays below the 99 KB of shared memory of small GPUs.
_TILES = {
    16: Tiles(128, 64, 128, 64),
    32: Tiles(128, 64, 128, 64),
    64: Tiles(128, 64, 128, 64),
    128: Tiles(128, 64, 64, 32),
    256: Tiles(64, 32, 32, 16),
    512: Tiles(32, 16, 16, 16),
    1024: Tiles(16, 16, 16, 16),
}
# An fp32 vector is twice as large, and without matrix units its products live in registers.
_FP32_WIDTH = 4


def fused_block_attention(
    q_NGnd: torch.Tensor,
    context_k_Snd: torch.Tensor,
    context_v_Snd: torch.Tensor,
    block_k_NGnd: torch.Tensor,
    block_v_NGnd: torch.Tensor,
    anchors_N: torch.Tensor,
    starts_N: torch.Tensor,
    window: int | None = None,
) -> torch.Tensor:
    """As `block_attention`. fp32, bf16 or fp16; head sizes up to 256."""
    return _FusedBlockAttention.apply(
        q_NGnd, context_k_Snd, context_v_Snd, block_k_NGnd, block_v_NGnd, starts_N, starts_N + anchors_N, window or 0
    )


class _FusedBlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, context_k: torch.Tensor, context_v: torch.Tensor, block_k: torch.Tensor,
        block_v: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor, window: int,
    ) -> torch.Tensor:  # fmt: skip
        q, context_k, context_v, block_k, block_v = (
            x.contiguous() for x in (q, context_k, context_v, block_k, block_v)
        )
        out, lse = torch.empty_like(q), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        tiles, sizes = _sizes(q, context_k, window)
        rows = lse.numel() // context_k.shape[1]
        if rows:
            _forward_kernel[(triton.cdiv(rows, tiles.rows), context_k.shape[1])](
                q, context_k, context_v, block_k, block_v, starts, ends, out, lse, rows, window,
                **sizes, ROWS=tiles.rows, KEYS=tiles.keys, num_warps=_warps(tiles.rows), num_stages=2,
            )  # fmt: skip
        ctx.save_for_backward(q, context_k, context_v, block_k, block_v, starts, ends, out, lse)
        ctx.window = window
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, context_k, context_v, block_k, block_v, starts, ends, out, lse = ctx.saved_tensors
        grad, window, heads = grads[0].contiguous(), ctx.window, context_k.shape[1]
        tiles, sizes = _sizes(q, context_k, window)
        options = {"num_warps": _warps(tiles.kept), "num_stages": 2}
        rows = lse.numel() // heads
        dq, delta = torch.empty_like(q), torch.empty_like(lse)
        if rows:
            _query_kernel[(triton.cdiv(rows, tiles.kept), heads)](
                q, context_k, context_v, block_k, block_v, starts, ends, out, lse, grad, dq, delta, rows, window,
                **sizes, ROWS=tiles.kept, KEYS=tiles.streamed, **options,
            )  # fmt: skip
        results = [dq]
        for k, v, own in ((context_k, context_v, False), (block_k, block_v, True)):
            dk, dv = torch.empty_like(k), torch.empty_like(v)
            keys = k.numel() // (heads * k.shape[-1])
            if keys:
                first, last = _seen_by(starts, ends, keys, tiles.kept, window) if not own else (starts, ends)
                _key_kernel[(triton.cdiv(keys, tiles.kept), heads)](
                    q, k, v, starts, ends, first, last, lse, grad, delta, dk, dv, rows, keys, window,
                    **sizes, OWN=own, ROWS=tiles.streamed, KEYS=tiles.kept, **options,
                )  # fmt: skip
            results += [dk, dv]
        return *results, None, None, None


def _seen_by(
    starts_N: torch.Tensor, ends_N: torch.Tensor, keys: int, tile: int, window: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Per tile of context keys the first block that sees some of it, and one past the last."""
    tile_starts = torch.arange(0, keys, tile, device=starts_N.device)
    first = torch.searchsorted(ends_N, tile_starts, right=True)
    last = torch.searchsorted(starts_N, tile_starts + tile)
    if window:
        last = torch.minimum(last, torch.searchsorted(ends_N, tile_starts + (tile + window - 1)))
    return first, last


def _sizes(q_NGnd: torch.Tensor, context_k_Snd: torch.Tensor, window: int) -> tuple[Tiles, dict[str, Any]]:
    dim, heads = q_NGnd.shape[-1], context_k_Snd.shape[1]
    width = max(16, triton.next_power_of_2(dim))
    exact = q_NGnd.dtype == torch.float32
    return _TILES[width * (_FP32_WIDTH if exact else 1)], {
        "SLOTS": q_NGnd.shape[1],
        "GROUP": q_NGnd.shape[2] // heads,
        "KV_HEADS": heads,
        "DIM": dim,
        "WIDTH": width,
        "WINDOWED": window > 0,
        # fp32 inputs are multiplied as fp32: tf32 would round them to ten bits.
        "PRECISION": "ieee" if exact else "tf32",
        "SCALE": dim**-0.5,
    }


def _warps(tile: int) -> int:
    return 8 if tile >= 128 else 4


@triton.jit
def _addresses(index, per_item: tl.constexpr, head, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Element offsets [len(index), WIDTH] of head vectors; per_item vectors per index."""
    return (index.to(tl.int64) * per_item + head)[:, None] * DIM + tl.arange(0, WIDTH)[None, :]


@triton.jit
def _vectors(base, index, live, per_item: tl.constexpr, head, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Head vectors [len(index), WIDTH], zero where not live."""
    mask = live[:, None] & (tl.arange(0, WIDTH) < DIM)[None, :]
    return tl.load(base + _addresses(index, per_item, head, DIM, WIDTH), mask=mask, other=0.0)


@triton.jit
def _context_interval(
    row, live, starts, ends, window, SLOTS: tl.constexpr, GROUP: tl.constexpr, WINDOWED: tl.constexpr
):
    """Context keys [first, end) that rows see."""
    slot = row // GROUP
    first = tl.load(starts + slot // SLOTS, mask=live, other=0).to(tl.int32)
    end = tl.load(ends + slot // SLOTS, mask=live, other=0).to(tl.int32)
    if WINDOWED:
        first = tl.maximum(first, end + slot % SLOTS - (window - 1))
    return first, end


@triton.jit
def _own_interval(row, live, SLOTS: tl.constexpr, GROUP: tl.constexpr, WINDOWED: tl.constexpr):
    """Block keys [first, end) that rows see, as n·G + j."""
    slot = row // GROUP
    first = slot // SLOTS * SLOTS
    end = slot + 1 if WINDOWED else first + SLOTS
    return first, tl.where(live, end, 0)


@triton.jit
def _reach(tile, rows, starts, ends, window, SLOTS: tl.constexpr, GROUP: tl.constexpr, WINDOWED: tl.constexpr,
           ROWS: tl.constexpr):  # fmt: skip
    """(first block of a tile of rows, one past the last, first context key that any of its rows sees, one past the last)."""
    block = tile * ROWS // (SLOTS * GROUP)
    last = (tl.minimum(tile * ROWS + ROWS, rows) - 1) // (SLOTS * GROUP)
    low = tl.load(starts + block).to(tl.int32)
    if WINDOWED:
        low = tl.maximum(low, tl.load(ends + block).to(tl.int32) - (window - 1))
    return block, last + 1, low, tl.load(ends + last).to(tl.int32)


@triton.jit
def _scores(q, k, key, first, end, SCALE: tl.constexpr, PRECISION: tl.constexpr):
    """Scores in base 2 [rows, keys], −inf where a row does not see the key."""
    seen = (key[None, :] >= first[:, None]) & (key[None, :] < end[:, None])
    return tl.where(seen, tl.dot(q, tl.trans(k), input_precision=PRECISION) * (SCALE * _LOG2_E), float("-inf"))


@triton.jit
def _attend(
    out, peak, mass, q, k_base, v_base, low, high, first, end, head, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
    WIDTH: tl.constexpr, SCALE: tl.constexpr, PRECISION: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Adds keys low … high − 1 to a running softmax: out and mass are relative to 2^peak."""
    for start in range(low, high, KEYS):
        key = start + tl.arange(0, KEYS)
        k = _vectors(k_base, key, key < high, KV_HEADS, head, DIM, WIDTH)
        v = _vectors(v_base, key, key < high, KV_HEADS, head, DIM, WIDTH)
        scores = _scores(q, k, key, first, end, SCALE, PRECISION)
        higher = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(peak - higher)
        out = out * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        mass = mass * shrink + tl.sum(weights, 1)
        peak = higher
    return out, peak, mass


@triton.jit(do_not_specialize=["rows", "window"])
def _forward_kernel(
    q_base, context_k, context_v, block_k, block_v, starts, ends, out_base, lse_base, rows, window,
    SLOTS: tl.constexpr, GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    WINDOWED: tl.constexpr, PRECISION: tl.constexpr, SCALE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    tile, head = tl.program_id(0), tl.program_id(1)
    row = tile * ROWS + tl.arange(0, ROWS)
    live = row < rows
    query_head = head * GROUP + row % GROUP
    q = _vectors(q_base, row // GROUP, live, KV_HEADS * GROUP, query_head, DIM, WIDTH)
    block, past, low, high = _reach(tile, rows, starts, ends, window, SLOTS, GROUP, WINDOWED, ROWS)
    # Finite, so that rows that have seen nothing yet stay defined; a row's own slot gives it a real peak.
    peak = tl.full([ROWS], -1e30, tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, WIDTH], tl.float32)
    first, end = _own_interval(row, live, SLOTS, GROUP, WINDOWED)
    out, peak, mass = _attend(
        out, peak, mass, q, block_k, block_v, block * SLOTS, past * SLOTS, first, end, head,
        KV_HEADS, DIM, WIDTH, SCALE, PRECISION, KEYS,
    )  # fmt: skip
    first, end = _context_interval(row, live, starts, ends, window, SLOTS, GROUP, WINDOWED)
    out, peak, mass = _attend(
        out, peak, mass, q, context_k, context_v, low, high, first, end, head,
        KV_HEADS, DIM, WIDTH, SCALE, PRECISION, KEYS,
    )  # fmt: skip
    mass = tl.where(live, mass, 1.0)
    place = (row // GROUP).to(tl.int64) * (KV_HEADS * GROUP) + query_head
    tl.store(lse_base + place, peak + tl.log2(mass), mask=live)
    mask = live[:, None] & (tl.arange(0, WIDTH) < DIM)[None, :]
    addresses = _addresses(row // GROUP, KV_HEADS * GROUP, query_head, DIM, WIDTH)
    tl.store(out_base + addresses, (out / mass[:, None]).to(out_base.dtype.element_ty), mask=mask)


@triton.jit
def _attend_back(
    dq, q, grad, lse, delta, k_base, v_base, low, high, first, end, head, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
    WIDTH: tl.constexpr, SCALE: tl.constexpr, PRECISION: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Adds what keys low … high − 1 do to the queries' gradient, up to the scale."""
    for start in range(low, high, KEYS):
        key = start + tl.arange(0, KEYS)
        k = _vectors(k_base, key, key < high, KV_HEADS, head, DIM, WIDTH)
        v = _vectors(v_base, key, key < high, KV_HEADS, head, DIM, WIDTH)
        weights = tl.exp2(_scores(q, k, key, first, end, SCALE, PRECISION) - lse[:, None])
        d_weights = tl.dot(grad, tl.trans(v), input_precision=PRECISION)
        d_scores = weights * (d_weights - delta[:, None])
        dq += tl.dot(d_scores.to(k.dtype), k, input_precision=PRECISION)
    return dq


@triton.jit(do_not_specialize=["rows", "window"])
def _query_kernel(
    q_base, context_k, context_v, block_k, block_v, starts, ends, out_base, lse_base, grad_base, dq_base, delta_base,
    rows, window,
    SLOTS: tl.constexpr, GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    WINDOWED: tl.constexpr, PRECISION: tl.constexpr, SCALE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """dq, and δ for the keys' kernel."""
    tile, head = tl.program_id(0), tl.program_id(1)
    row = tile * ROWS + tl.arange(0, ROWS)
    live = row < rows
    query_head = head * GROUP + row % GROUP
    q = _vectors(q_base, row // GROUP, live, KV_HEADS * GROUP, query_head, DIM, WIDTH)
    grad = _vectors(grad_base, row // GROUP, live, KV_HEADS * GROUP, query_head, DIM, WIDTH)
    out = _vectors(out_base, row // GROUP, live, KV_HEADS * GROUP, query_head, DIM, WIDTH)
    place = (row // GROUP).to(tl.int64) * (KV_HEADS * GROUP) + query_head
    lse = tl.load(lse_base + place, mask=live, other=0.0)
    delta = tl.sum(grad.to(tl.float32) * out.to(tl.float32), 1)
    tl.store(delta_base + place, delta, mask=live)
    block, past, low, high = _reach(tile, rows, starts, ends, window, SLOTS, GROUP, WINDOWED, ROWS)
    first, end = _own_interval(row, live, SLOTS, GROUP, WINDOWED)
    dq = _attend_back(
        tl.zeros([ROWS, WIDTH], tl.float32), q, grad, lse, delta, block_k, block_v, block * SLOTS, past * SLOTS,
        first, end, head, KV_HEADS, DIM, WIDTH, SCALE, PRECISION, KEYS,
    )  # fmt: skip
    first, end = _context_interval(row, live, starts, ends, window, SLOTS, GROUP, WINDOWED)
    dq = _attend_back(
        dq, q, grad, lse, delta, context_k, context_v, low, high, first, end, head,
        KV_HEADS, DIM, WIDTH, SCALE, PRECISION, KEYS,
    )  # fmt: skip
    mask = live[:, None] & (tl.arange(0, WIDTH) < DIM)[None, :]
    addresses = _addresses(row // GROUP, KV_HEADS * GROUP, query_head, DIM, WIDTH)
    tl.store(dq_base + addresses, (dq * SCALE).to(dq_base.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows", "keys", "window"])
def _key_kernel(
    q_base, k_base, v_base, starts, ends, first_base, last_base, lse_base, grad_base, delta_base, dk_base, dv_base,
    rows, keys, window,
    SLOTS: tl.constexpr, GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    WINDOWED: tl.constexpr, PRECISION: tl.constexpr, SCALE: tl.constexpr, OWN: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """dk and dv of a tile of context keys, or of block keys (OWN), from every row that sees some of it."""
    tile, head = tl.program_id(0), tl.program_id(1)
    key = tile * KEYS + tl.arange(0, KEYS)
    k = _vectors(k_base, key, key < keys, KV_HEADS, head, DIM, WIDTH)
    v = _vectors(v_base, key, key < keys, KV_HEADS, head, DIM, WIDTH)
    if OWN:
        block = tile * KEYS // SLOTS
        past = (tl.minimum(tile * KEYS + KEYS, keys) - 1) // SLOTS + 1
    else:
        block = tl.load(first_base + tile).to(tl.int32)
        past = tl.load(last_base + tile).to(tl.int32)
    dk = tl.zeros([KEYS, WIDTH], tl.float32)
    dv = tl.zeros([KEYS, WIDTH], tl.float32)
    for start in range(block * SLOTS * GROUP, past * SLOTS * GROUP, ROWS):
        row = start + tl.arange(0, ROWS)
        live = row < rows
        query_head = head * GROUP + row % GROUP
        q = _vectors(q_base, row // GROUP, live, KV_HEADS * GROUP, query_head, DIM, WIDTH)
        grad = _vectors(grad_base, row // GROUP, live, KV_HEADS * GROUP, query_head, DIM, WIDTH)
        place = (row // GROUP).to(tl.int64) * (KV_HEADS * GROUP) + query_head
        lse = tl.load(lse_base + place, mask=live, other=0.0)
        delta = tl.load(delta_base + place, mask=live, other=0.0)
        if OWN:
            first, end = _own_interval(row, live, SLOTS, GROUP, WINDOWED)
        else:
            first, end = _context_interval(row, live, starts, ends, window, SLOTS, GROUP, WINDOWED)
        # Transposed, [keys, rows]: both sums over rows are then products without another transposition.
        scores = tl.dot(k, tl.trans(q), input_precision=PRECISION) * (SCALE * _LOG2_E)
        seen = (key[:, None] >= first[None, :]) & (key[:, None] < end[None, :])
        weights = tl.exp2(tl.where(seen, scores, float("-inf")) - lse[None, :])
        dv += tl.dot(weights.to(grad.dtype), grad, input_precision=PRECISION)
        d_weights = tl.dot(v, tl.trans(grad), input_precision=PRECISION)
        d_scores = weights * (d_weights - delta[None, :])
        dk += tl.dot(d_scores.to(q.dtype), q, input_precision=PRECISION)
    mask = (key < keys)[:, None] & (tl.arange(0, WIDTH) < DIM)[None, :]
    addresses = _addresses(key, KV_HEADS, head, DIM, WIDTH)
    tl.store(dk_base + addresses, (dk * SCALE).to(dk_base.dtype.element_ty), mask=mask)
    tl.store(dv_base + addresses, dv.to(dv_base.dtype.element_ty), mask=mask)
