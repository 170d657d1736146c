"""Attention kernels that torch ships, with their log-sum-exp, so that partial attentions can be merged exactly.

Softmax attention over the union of disjoint key sets is the sum of the parts' outputs weighted by exp(lse_part − lse). The
backward kernels use output and log-sum-exp only through P = exp(s − lse) and D = Σ dO·O, so handing them the *merged* ones
gives exact gradients of each part.

Layout of every tensor: [B, heads, rows, d]; log-sum-exps [B, heads, rows], fp32 (fp64 for fp64 inputs).
"""

import torch

_aten = torch.ops.aten

Extra = tuple[torch.Tensor, ...]
"""What the matching backward kernel wants back."""


def attention_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, bias: torch.Tensor | None = None, *,
    causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, Extra]:  # fmt: skip
    """Output, log-sum-exp, extra. bias (on a CPU only): additive [B, heads, rows, keys] in q's dtype (see `bias_like`);
    None: all see all, or with `causal` (as many rows as keys then) what stands at or before them.

    A row whose bias hides every key has no defined result.
    """
    if q.device.type == "cpu":
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
        return out, lse, ()
    if _flash_fits(q):
        result = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
        return result[0], result[1], (result[6], result[7])
    out, lse, seed, offset = _aten._scaled_dot_product_efficient_attention(
        q, k, v, None, True, 0.0, causal, scale=scale
    )
    return out, lse[..., : q.shape[2]], (seed, offset)


def attention_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    scale: float, extra: Extra, bias: torch.Tensor | None = None, *, causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Gradients of q, k, v. out and lse: those of the whole softmax this part belongs to."""
    if q.device.type == "cpu":
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal, attn_mask=bias, scale=scale
        )
    if _flash_fits(q):
        return _aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, causal, *extra, scale=scale
        )
    # This kernel wants log-sum-exps padded to whole blocks of 32 rows.
    padded = torch.nn.functional.pad(lse, (0, -lse.shape[2] % 32), value=torch.inf)
    return _aten._scaled_dot_product_efficient_attention_backward(
        grad, q, k, v, None, out, padded, *extra, 0.0, [True, True, True, False], causal, scale=scale
    )[:3]


def bias_like(q: torch.Tensor, visible_RS: torch.Tensor) -> torch.Tensor:
    """[rows, keys] bool → additive bias for q [B, heads, rows, d], without a copy per head."""
    bias = torch.zeros(visible_RS.shape, dtype=q.dtype, device=q.device).masked_fill_(~visible_RS, -torch.inf)
    return bias.expand(q.shape[0], q.shape[1], *visible_RS.shape)


def _flash_fits(q: torch.Tensor) -> bool:
    return q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
