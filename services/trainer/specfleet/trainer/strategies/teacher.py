"""The frozen head of the target, as teacher over a draft vocabulary."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch

from specfleet.trainer.strategies.soft_ce import Teacher, chunk_rows

# Rows of the full-vocabulary pass computed at once on a CPU: 512 rows × 150k logits is 150 MB in bf16.
_ROWS = 512


@dataclass(frozen=True)
class Judgement:
    """What the teacher says about U rows: distribution, and preferred token [U] (target ids)."""

    teacher: Teacher
    argmax_U: torch.Tensor


def needs_full_head(extras: Collection[str], *, mass: bool) -> bool:
    """Must the trainer keep the whole head, or did capture record what it would be used for?

    mass: whether the loss needs the true probability mass (LK), and so the log-sum-exp over the whole vocabulary.
    """
    return "teacher_argmax" not in extras or (mass and "teacher_lse" not in extras)


class FrozenTeacher:
    """Teacher logits from captured post-norm states: W_T·H, in the head's dtype; statistics in fp32."""

    def __init__(self, head_VH: torch.Tensor, chosen_ids: torch.Tensor, *, full: bool) -> None:
        """chosen_ids [V_d]: target ids of the draft vocabulary, ascending. full: keep the whole head (`needs_full_head`)."""
        self._covers_everything = len(chosen_ids) == len(head_VH)
        self._chosen_head = head_VH if self._covers_everything else head_VH[chosen_ids].contiguous()
        self._full_head = head_VH if full or self._covers_everything else None
        self._rows = chunk_rows(len(head_VH), head_VH.device, _ROWS)

    @torch.no_grad()
    def judge(self, states_UH: torch.Tensor, captured: Mapping[str, torch.Tensor], *, mass: bool) -> Judgement:
        """captured: `teacher_argmax` and `teacher_lse` of the rows, where capture recorded them.

        The whole vocabulary is visited only for a reduced draft vocabulary, and only when what is needed (the argmax; with
        `mass` the log-sum-exp too) was not captured.
        """
        logits, lse = self.draft_logits(states_UH)
        argmax, full_lse = captured.get("teacher_argmax"), captured.get("teacher_lse")
        if argmax is None or (mass and full_lse is None) or self._covers_everything:
            whole = self._whole_vocabulary(states_UH, logits, lse)
            argmax, full_lse = (whole[0] if argmax is None else argmax), (whole[1] if full_lse is None else full_lse)
        return Judgement(Teacher(logits, lse, full_lse), argmax.long())

    @torch.no_grad()
    def draft_logits(self, states_UH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits over the draft vocabulary [U, V_d] and their fp32 log-sum-exp [U]."""
        logits = states_UH.to(self._chosen_head.dtype) @ self._chosen_head.T
        return logits, torch.cat([_lse(rows) for rows in logits.split(self._rows)] or [_lse(logits)])

    def _whole_vocabulary(
        self, states_UH: torch.Tensor, logits_UV: torch.Tensor, lse_U: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Preferred token [U] and log-sum-exp [U] over the target's whole vocabulary."""
        if self._covers_everything:
            return logits_UV.argmax(-1), lse_U
        if self._full_head is None:
            raise ValueError("this teacher was built without the full head, and capture recorded no teacher facts")
        argmax = torch.empty(len(states_UH), dtype=torch.int64, device=states_UH.device)
        lse = torch.empty_like(lse_U)
        for start in range(0, len(states_UH), self._rows):
            rows = slice(start, start + self._rows)
            logits = states_UH[rows].to(self._full_head.dtype) @ self._full_head.T
            argmax[rows], lse[rows] = logits.argmax(-1), _lse(logits)
        return argmax, lse


def _lse(logits: torch.Tensor) -> torch.Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).logsumexp(-1)
