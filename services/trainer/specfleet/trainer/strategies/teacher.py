"""The frozen head of the target, as teacher over a draft vocabulary."""

import torch

# Rows of the full-vocabulary pass computed at once: 512 rows × 150k logits is 150 MB in bf16.
_ROWS = 512


class FrozenTeacher:
    """Teacher logits from captured post-norm states: W_T·H, in the head's dtype; statistics in fp32."""

    def __init__(self, head_VH: torch.Tensor, chosen_ids: torch.Tensor, *, full: bool) -> None:
        """chosen_ids [V_d]: target ids of the draft vocabulary, ascending. full: keep the whole head, for `argmax`."""
        self._chosen = chosen_ids
        self._chosen_head = head_VH if len(chosen_ids) == len(head_VH) else head_VH[chosen_ids].contiguous()
        self._full_head = head_VH if full else None

    @torch.no_grad()
    def draft_logits(self, states_UH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits over the draft vocabulary [U, V_d] and their fp32 log-sum-exp [U]."""
        logits = states_UH.to(self._chosen_head.dtype) @ self._chosen_head.T
        return logits, torch.cat([rows.float().logsumexp(-1) for rows in logits.split(_ROWS)] or [logits.new_zeros(0)])

    @torch.no_grad()
    def argmax(self, states_UH: torch.Tensor, logits_UV: torch.Tensor) -> torch.Tensor:
        """The target's preferred token [U] over its whole vocabulary."""
        if self._full_head is None:
            raise ValueError("this teacher was built without the full head")
        if self._full_head is self._chosen_head:
            return logits_UV.argmax(-1)
        states = states_UH.to(self._full_head.dtype)
        return torch.cat([(rows @ self._full_head.T).argmax(-1) for rows in states.split(_ROWS)] or [self._chosen[:0]])
