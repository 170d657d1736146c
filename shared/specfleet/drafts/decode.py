"""The reference decoder: speculative decoding of one sequence, written to be read.

Tokens x_0 … x_s are committed, and x_s (the anchor) has not been run through the target. A round drafts d_1 … d_k after x_s,
runs [x_s, d_1 … d_k] through the target once, accepts leading drafts by a rule, and commits those plus one token of the
target's. Under the rules that are lossless the output is the target's own, however bad the draft is: token for token when
greedy, in distribution when sampling.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch

from specfleet.drafts.base import Drafter
from specfleet.drafts.verification import Greedy, Proposal, Rule
from specfleet.target.hf import HFTarget


@dataclass
class Decoded:
    """ids: the new tokens, an end token included. accepted[r] drafts and committed[r] tokens in round r.

    The first token comes from the prefill and belongs to no round. committed is accepted + 1, less in a round that an end
    token or max_new_tokens cuts short.
    """

    ids: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    committed: list[int] = field(default_factory=list)

    @property
    def acceptance_length(self) -> float:
        """Tokens committed per target pass; 1 is no speculation."""
        return sum(self.committed) / len(self.committed) if self.committed else 1.0


@torch.no_grad()
def decode(
    target: HFTarget,
    drafter: Drafter | None,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    num_draft_tokens: int,
    eos_token_ids: Collection[int],
    rule: Rule,
) -> Decoded:
    """Continuation of prompt_ids. Without a drafter: plain autoregressive decoding, one token per round.

    The target must have been loaded with the layers the drafter reads.
    """
    cache = target.new_cache()
    result = Decoded()
    logits, aux, _ = target.forward(torch.tensor([list(prompt_ids)]), cache)
    committed = [*prompt_ids, rule.judge(Proposal([]), logits[-1:])[1]]
    result.ids.append(committed[-1])
    if drafter is not None:
        drafter.extend(committed[1:], aux)
    while len(result.ids) < max_new_tokens and result.ids[-1] not in eos_token_ids:
        left = max_new_tokens - len(result.ids)
        proposal = rule.propose(drafter, min(num_draft_tokens, left)) if drafter is not None else Proposal([])
        logits, aux, _ = target.forward(torch.tensor([[committed[-1], *proposal.ids]]), cache)
        accepted, own = rule.judge(proposal, logits)
        new = cut([*proposal.ids[:accepted], own], left, eos_token_ids)
        result.accepted.append(min(accepted, len(new)))
        result.committed.append(len(new))
        result.ids += new
        committed += new
        # The last committed token has not been run yet; every other new one has, and only those may stay cached.
        target.crop(cache, len(committed) - 1)
        if drafter is not None:
            drafter.extend(new, aux[: len(new)])
    return result


def decode_greedy(
    target: HFTarget,
    drafter: Drafter | None,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    num_draft_tokens: int,
    eos_token_ids: Collection[int] = (),
) -> Decoded:
    """The target's greedy continuation."""
    return decode(target, drafter, prompt_ids, max_new_tokens, num_draft_tokens, eos_token_ids, Greedy())


def cut(ids: Sequence[int], limit: int, eos_token_ids: Collection[int]) -> list[int]:
    """At most `limit` ids, and nothing after the first end token."""
    kept = list(ids[:limit])
    for index, token in enumerate(kept):
        if token in eos_token_ids:
            return kept[: index + 1]
    return kept
