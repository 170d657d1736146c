"""Keys and values of one attention layer of one sequence, for drafters that decode step by step."""

import torch
from torch.nn import functional


class KeyValueCache:
    """Rows live at their positions; writing at a position forgets nothing but what is overwritten or lies behind."""

    def __init__(self, num_key_value_heads: int, head_dim: int, like: torch.Tensor) -> None:
        """like: a tensor with the dtype and device of the keys."""
        self._keys = torch.empty(num_key_value_heads, 256, head_dim, dtype=like.dtype, device=like.device)
        self._values = torch.empty_like(self._keys)

    def attend(self, q_RNd: torch.Tensor, keys_RHd: torch.Tensor, values_RHd: torch.Tensor, start: int) -> torch.Tensor:
        """R rows at positions start, start + 1, … are stored, and see everything before them and one another causally.

        Returns [R, n_q, d].
        """
        count = len(q_RNd)
        end = start + count
        self._reserve(end)
        self._keys[:, start:end] = keys_RHd.transpose(0, 1)
        self._values[:, start:end] = values_RHd.transpose(0, 1)
        mask = None
        if count > 1:
            device = q_RNd.device
            mask = torch.arange(end, device=device) <= torch.arange(start, end, device=device)[:, None]
        attended = functional.scaled_dot_product_attention(
            q_RNd.transpose(0, 1)[None],
            self._keys[None, :, :end],
            self._values[None, :, :end],
            attn_mask=mask,
            enable_gqa=True,
        )
        return attended[0].transpose(0, 1)

    def _reserve(self, length: int) -> None:
        capacity = self._keys.shape[1]
        if length > capacity:
            grow = max(length, 2 * capacity) - capacity
            self._keys = functional.pad(self._keys, (0, 0, 0, grow))
            self._values = functional.pad(self._values, (0, 0, 0, grow))
