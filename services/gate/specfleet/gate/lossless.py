"""Speculation must not change what the target says: token ids with and without the draft, in float32.

When asked, the same prompts are decoded once more at a temperature: what greedy acceptance promises need not hold there.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specfleet.drafts.base import Draft
from specfleet.drafts.decode import decode, decode_greedy
from specfleet.drafts.verification import Chance, Rejection, Rule, Sampling, TargetOnly
from specfleet.gate.rows import EvalRow
from specfleet.target.hf import HFTarget
from specfleet.wire.gate_pb2 import StartGateRequest

SAMPLING_SEED = 42


@dataclass(frozen=True)
class Decoded:
    """One prompt, decoded twice. logit_gap: between the target's two best tokens where the texts part.

    sampled_length: acceptance length at the asked temperature, None without one.
    """

    row: EvalRow
    plain: list[int]
    speculative: list[int]
    acceptance_length: float
    logit_gap: float | None
    sampled_length: float | None = None

    @property
    def first_difference(self) -> int | None:
        """0-based index of the first new token that differs."""
        if self.plain == self.speculative:
            return None
        pairs = zip(self.plain, self.speculative, strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(self.plain), len(self.speculative)))


def sampling_rule(request: StartGateRequest) -> Rejection | None:
    """What a job samples with; None at temperature 0. Raises ConfigError SF-DECODE-SAMPLING."""
    if not request.temperature:
        return None
    rule = TargetOnly if request.acceptance_rule == TargetOnly.name else Rejection
    return rule(Sampling(request.temperature, request.top_k, request.top_p or 1.0), Chance(SAMPLING_SEED))


def decode_both(
    rows: Sequence[EvalRow],
    draft: Draft,
    target_dir: Path,
    *,
    per_source: int,
    new_tokens: int,
    depth: int,
    device: str,
    progress: Callable[[int, int], None],
    rule: Rule | None = None,
) -> list[Decoded]:
    """Decodes `per_source` prompts of each source, shortest first. The draft is converted to float32.

    rule: to decode once more by.
    """
    chosen = shortest(rows, per_source)
    if not chosen:
        return []
    target = HFTarget.load(target_dir, draft.config.layer_ids, "float32", device)
    draft = draft.to(device, torch.float32)
    ends = target.facts.eos_token_ids
    results: list[Decoded] = []
    progress(0, len(chosen))
    for row in chosen:
        prompt = list(row.text.input_ids[: row.text.prompt_tokens])
        plain = decode_greedy(target, None, prompt, new_tokens, depth, ends).ids
        drafter = draft.drafter(target.embedding_VH, target.head_VH)
        found = decode_greedy(target, drafter, prompt, new_tokens, depth, ends)
        gap = None if plain == found.ids else _gap(target, prompt, plain, found.ids)
        sampled = None
        if rule is not None:
            drafter = draft.drafter(target.embedding_VH, target.head_VH)
            sampled = decode(target, drafter, prompt, new_tokens, depth, ends, rule).acceptance_length
        results.append(Decoded(row, plain, found.ids, found.acceptance_length, gap, sampled))
        progress(len(results), len(chosen))
    return results


def shortest(rows: Sequence[EvalRow], per_source: int) -> list[EvalRow]:
    """Short prompts prefill fast, and losslessness does not depend on their length."""
    by_source: dict[str, list[EvalRow]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: row.text.prompt_tokens):
        by_source[row.source].append(row)
    return [row for source in sorted(by_source) for row in by_source[source][:per_source]]


def _gap(target: HFTarget, prompt: list[int], plain: list[int], other: list[int]) -> float:
    """Tells a rounding tie (about 1e-5) from a defect."""
    same = next((i for i, (a, b) in enumerate(zip(plain, other, strict=False)) if a != b), min(len(plain), len(other)))
    logits, _, _ = target.forward(torch.tensor([[*prompt, *plain[:same]]]))
    best = logits[-1].topk(2).values
    return float(best[0] - best[1])


def lossless_report(decoded: Sequence[Decoded]) -> dict[str, Any]:
    rows = [
        {
            "source": item.row.source,
            "id": item.row.id,
            "tokens": len(item.plain),
            "identical": item.first_difference is None,
            "first_difference": item.first_difference,
            "logit_gap": item.logit_gap,
            "acceptance_length": round(item.acceptance_length, 4),
            "sampled_acceptance_length": None if item.sampled_length is None else round(item.sampled_length, 4),
        }
        for item in decoded
    ]
    return {
        "identical": all(row["identical"] for row in rows),
        "tokens": sum(len(item.plain) for item in decoded),
        "rows": rows,
    }
