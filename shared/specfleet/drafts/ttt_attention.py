"""Attention of a training-time-test rollout (EAGLE-3, arXiv 2503.01840 §3.2): causal prefix plus each row's own step keys.

At step i, row t attends to prefix keys 0..t (made from target states at step 0) and to the keys that row t itself made at
steps 1..i. The prefix part is ordinary causal attention, so it runs on the flash kernels torch ships; the i diagonal terms
are merged into it by their log-sum-exp. Memory is O(rows), and no mask is ever built.
"""

from typing import Any

import torch

from specfleet.drafts.lse_attention import attention_backward, attention_forward


def ttt_attention(
    q_RNd: torch.Tensor,
    prefix_k_BNTd: torch.Tensor,
    prefix_v_BNTd: torch.Tensor,
    rows_R: torch.Tensor,
    own_2JRHd: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention output [R, n_q, d] of R rows of a padded batch.

    rows_R: flat indices b·T + t, ascending. prefix_k, prefix_v: keys and values repeated to n_q heads. own: keys and values
    [2, J, R, n_kv, d] that the same rows made at steps 1..J; None at step 0.
    """
    return _TttAttention.apply(q_RNd, prefix_k_BNTd, prefix_v_BNTd, rows_R, own_2JRHd)


class _TttAttention(torch.autograd.Function):
    """Backward hands the *merged* output and log-sum-exp to the flash backward kernel.

    That kernel uses them only through P = exp(s − lse) and D = Σ dO·O, both of which are then those of the whole softmax,
    so the prefix gradients come out exact.
    """

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k0: torch.Tensor, v0: torch.Tensor, rows: torch.Tensor, own: torch.Tensor | None
    ) -> torch.Tensor:
        scale = q.shape[-1] ** -0.5
        q_pad = _scatter(q, rows, k0)
        out, lse, extra = attention_forward(q_pad, k0, v0, scale, causal=True)
        ctx.diagonal = own is not None
        if own is None:
            ctx.save_for_backward(q_pad, k0, v0, out, lse, rows, *extra)
            return _gather(out, rows)
        keys, values = own
        # Merge in fp32: log-sum-exps of long prefixes need it.
        lse_R = lse.transpose(1, 2).reshape(-1, lse.shape[1])[rows]
        scores = _scores(q, keys, scale)
        merged = torch.logsumexp(torch.cat((lse_R[None], scores)), dim=0)
        weights = torch.exp(scores - merged)
        wide = lse.dtype
        result = _gather(out, rows).to(wide) * torch.exp(lse_R - merged)[..., None]
        result = (result + _weighted_values(weights, values)).to(q.dtype)
        out, lse = out.clone(), lse.clone()
        sample, place = rows // k0.shape[2], rows % k0.shape[2]
        out.transpose(1, 2)[sample, place] = result
        lse.transpose(1, 2)[sample, place] = merged
        ctx.save_for_backward(q_pad, k0, v0, out, lse, rows, own, weights, *extra)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q_pad, k0, v0, out, lse, rows, *rest = ctx.saved_tensors
        grad = grads[0].contiguous()
        scale = q_pad.shape[-1] ** -0.5
        extra = rest[2:] if ctx.diagonal else rest
        dq_pad, dk0, dv0 = attention_backward(
            _scatter(grad, rows, k0), q_pad, k0, v0, out, lse, scale, tuple(extra), causal=True
        )
        dq = _gather(dq_pad, rows)
        if not ctx.diagonal:
            return dq, dk0, dv0, None, None
        (keys, values), weights = rest[:2]
        groups = q_pad.shape[1] // keys.shape[2]
        wide = weights.dtype
        grad_w, out_R = grad.to(wide), _gather(out, rows).to(wide)
        # J steps, R rows, heads split into (kv head, group).
        w = weights.unflatten(-1, (-1, groups))
        grad_g = grad_w.unflatten(1, (-1, groups))
        q_g = _gather(q_pad, rows).to(wide).unflatten(1, (-1, groups))
        d_values = torch.einsum("jrhg,rhgd->jrhd", w, grad_g)
        d_weights = torch.einsum("rhgd,jrhd->jrhg", grad_g, values.to(wide))
        d_scores = w * (d_weights - (grad_w * out_R).sum(-1).unflatten(1, (-1, groups))) * scale
        d_keys = torch.einsum("jrhg,rhgd->jrhd", d_scores, q_g)
        dq = dq.to(wide) + torch.einsum("jrhg,jrhd->rhgd", d_scores, keys.to(wide)).flatten(1, 2)
        return dq.to(q_pad.dtype), dk0, dv0, None, torch.stack((d_keys, d_values)).to(keys.dtype)


def _scores(q_RNd: torch.Tensor, keys_JRHd: torch.Tensor, scale: float) -> torch.Tensor:
    """Scaled diagonal scores [J, R, n_q], at least fp32."""
    wide = torch.promote_types(q_RNd.dtype, torch.float32)
    q = q_RNd.to(wide).unflatten(1, (keys_JRHd.shape[2], -1))
    return torch.einsum("rhgd,jrhd->jrhg", q, keys_JRHd.to(wide)).flatten(2) * scale


def _weighted_values(weights_JRN: torch.Tensor, values_JRHd: torch.Tensor) -> torch.Tensor:
    w = weights_JRN.unflatten(-1, (values_JRHd.shape[2], -1))
    return torch.einsum("jrhg,jrhd->rhgd", w, values_JRHd.to(weights_JRN.dtype)).flatten(1, 2)


def _scatter(x_RNd: torch.Tensor, rows_R: torch.Tensor, like_BNTd: torch.Tensor) -> torch.Tensor:
    """Rows → padded [B, n_q, T, d], zero elsewhere."""
    batch, heads, length, dim = like_BNTd.shape
    padded = x_RNd.new_zeros(batch * length, heads, dim)
    padded[rows_R] = x_RNd
    return padded.view(batch, length, heads, dim).transpose(1, 2)


def _gather(x_BNTd: torch.Tensor, rows_R: torch.Tensor) -> torch.Tensor:
    return x_BNTd.transpose(1, 2).reshape(-1, x_BNTd.shape[1], x_BNTd.shape[3])[rows_R]
