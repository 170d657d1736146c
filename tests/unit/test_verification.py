"""Acceptance rules. Losslessness is proven by enumeration: the decoder runs along every path that chance can take, and the
probabilities of the texts that come out are compared with the target's own."""

import itertools
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import cast

import pytest
import torch
from fixtures.outcomes import distribution

from specfleet.contracts.errors import ConfigError
from specfleet.drafts.base import Drafter, Pick, likeliest
from specfleet.drafts.decode import decode, decode_greedy
from specfleet.drafts.ngram import NgramDrafter
from specfleet.drafts.verification import Chance, Rejection, Rule, Sampling, TargetOnly
from specfleet.target.hf import HFTarget

VOCAB, PROMPT, NEW, K = 3, [0, 2], 3, 2
Logits = torch.Tensor
"""[position, last token, V]."""


class TableTarget:
    """A target whose logits stand in a table, so that they can be anything. Its cache is the list of ids read so far."""

    def __init__(self, table: Logits) -> None:
        self.table = table

    def new_cache(self) -> list[int]:
        return []

    def forward(self, input_ids_1T: torch.Tensor, cache: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        first, ids = len(cache), input_ids_1T[0].tolist()
        cache += ids
        rows = torch.stack([self.table[first + i, token] for i, token in enumerate(ids)])
        return rows, torch.zeros(len(ids), 0), torch.zeros(len(ids), 0)

    @staticmethod
    def crop(cache: list[int], length: int) -> None:
        del cache[length:]


class TableDrafter(Drafter):
    """Guesses one after the other from a table. stop_after: tokens behind which it makes no further guess in a round."""

    def __init__(self, table: Logits, stop_after: Collection[int] = ()) -> None:
        self.table, self.stop_after = table, stop_after
        self.length, self.last = 0, -1

    def extend(self, next_ids: Sequence[int], aux_TKH: torch.Tensor) -> None:
        assert len(next_ids) == len(aux_TKH)
        self.length += len(next_ids)
        self.last = next_ids[-1]

    def propose(self, k: int, pick: Pick = likeliest) -> list[int]:
        guesses: list[int] = []
        while len(guesses) < k:
            last = guesses[-1] if guesses else self.last
            if last in self.stop_after:
                break
            guesses.append(int(pick(self.table[self.length + len(guesses), last])))
        return guesses


class CertainDrafter(TableDrafter):
    """Asks nobody, like n-gram lookup."""

    def propose(self, k: int, pick: Pick = likeliest) -> list[int]:
        return super().propose(k)


def table(seed: int, scale: float = 1.5) -> Logits:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(len(PROMPT) + NEW + K, VOCAB, VOCAB, generator=generator)


TARGET, DRAFT = table(1), table(2)
REDUCED = DRAFT.clone()
REDUCED[..., 1] = -torch.inf
other = partial(TableDrafter, DRAFT)


def texts_of(
    rule: type[Rejection],
    sampling: Sampling,
    drafter: Callable[[], Drafter],
    eos: Collection[int] = (),
    **thresholds: float,
) -> dict[tuple[int, ...], float]:
    """New tokens → probability, over every path."""

    def run(chance: Chance) -> tuple[int, ...]:
        return tuple(decode(target(), drafter(), PROMPT, NEW, K, eos, rule(sampling, chance, **thresholds)).ids)

    return distribution(run)


def target() -> HFTarget:
    return cast(HFTarget, TableTarget(TARGET))


def targets_own(sampling: Sampling, eos: Collection[int] = ()) -> dict[tuple[int, ...], float]:
    """The same from the definition: products of the target's probabilities."""
    found: dict[tuple[int, ...], float] = {}
    for text in itertools.product(range(VOCAB), repeat=NEW):
        chance, last, kept = 1.0, PROMPT[-1], []
        for index, token in enumerate(text):
            chance *= float(sampling.distribution(TARGET[len(PROMPT) - 1 + index, last])[token])
            last = token
            kept.append(token)
            if token in eos:
                break
        if chance > 0:
            found[tuple(kept)] = chance
    return found


TEMPERED = Sampling(0.7)
CUT = Sampling(0.9, top_k=2, top_p=0.8)


@pytest.mark.parametrize("sampling", [Sampling(), TEMPERED, CUT], ids=["plain", "tempered", "top-k-p"])
@pytest.mark.parametrize(
    "drafter",
    [
        partial(TableDrafter, TARGET),
        other,
        partial(TableDrafter, REDUCED),
        partial(TableDrafter, DRAFT, stop_after=(1,)),
        partial(CertainDrafter, DRAFT),
        NgramDrafter,
    ],
    ids=["draft=target", "draft≠target", "reduced-vocabulary", "confidence-cut", "certain", "n-gram"],
)
def test_rejection_sampling_is_lossless(drafter: Callable[[], Drafter], sampling: Sampling) -> None:
    assert texts_of(Rejection, sampling, drafter) == pytest.approx(targets_own(sampling), abs=1e-9)


@pytest.mark.parametrize("eos", [(0,), (1, 2)])
def test_an_end_token_inside_a_block_ends_the_text_there(eos: tuple[int, ...]) -> None:
    for rule in (Rejection, TargetOnly):
        found = texts_of(rule, TEMPERED, other, eos)
        assert found == pytest.approx(targets_own(TEMPERED, eos), abs=1e-9)
        assert len({len(text) for text in found}) > 1


@pytest.mark.parametrize("draft", [TARGET, REDUCED], ids=["draft=target", "reduced"])
def test_target_only_acceptance_is_lossless_with_thresholds_of_one(draft: Logits) -> None:
    assert texts_of(TargetOnly, CUT, partial(TableDrafter, draft)) == pytest.approx(targets_own(CUT), abs=1e-9)


def first_guess(
    p: Sequence[float], rule: type[Rejection], q: Sequence[float], **thresholds: float
) -> dict[object, float]:
    """(accepted, token) → probability of a round with one guess, target p, draft q."""
    draft, own = (torch.tensor(x, dtype=torch.float64).log().expand(9, len(p), -1) for x in (q, p))

    def run(chance: Chance) -> tuple[bool, int]:
        acceptance = rule(Sampling(), chance, **thresholds)
        drafter = TableDrafter(draft)
        drafter.extend([0], torch.zeros(1, 0))
        proposal = acceptance.propose(drafter, 1)
        accepted, token = acceptance.judge(proposal, own[:2, 0])
        return bool(accepted), proposal.ids[0] if accepted else token

    return cast(dict[object, float], distribution(run))


def test_what_each_rule_accepts() -> None:
    """p = [.7, .3], q = [.6, .4]: drawn guesses survive with Σ min(p, q) = .9, the likeliest one with its own p = .7."""
    assert first_guess([0.7, 0.3], Rejection, [0.6, 0.4]) == pytest.approx(
        {(True, 0): 0.6, (True, 1): 0.3, (False, 0): 0.1}
    )
    assert first_guess([0.7, 0.3], TargetOnly, [0.6, 0.4]) == pytest.approx({(True, 0): 0.7, (False, 1): 0.3})


def test_lower_thresholds_accept_more_and_are_not_lossless() -> None:
    p, q = [0.4, 0.35, 0.25], [0.1, 0.8, 0.1]
    # Guess 1 with p = .35: accepted with .35 / .5, else replaced by 0 or 2 in the ratio 40 : 25.
    loose = first_guess(p, TargetOnly, q, threshold_acc=0.5)
    assert loose == pytest.approx({(True, 1): 0.7, (False, 0): 0.3 * 40 / 65, (False, 2): 0.3 * 25 / 65})
    assert first_guess(p, TargetOnly, q, threshold_single=0.3) == {(True, 1): 1.0}
    assert texts_of(TargetOnly, TEMPERED, other, threshold_acc=0.5) != pytest.approx(targets_own(TEMPERED), abs=0.02)


def test_a_biased_rule_is_noticed() -> None:
    """The classical mistake: replacing a refused guess by a draw from p itself."""

    class Careless(Rejection):
        def judge(self, proposal, logits_RV):  # type: ignore[no-untyped-def]
            accepted, token = super().judge(proposal, logits_RV)
            return (accepted, token) if accepted == len(proposal.ids) else (
                accepted, self._draw(self.sampling.distribution(logits_RV[accepted]))
            )  # fmt: skip

    assert texts_of(Careless, TEMPERED, other) != pytest.approx(targets_own(TEMPERED), abs=0.02)


def test_temperature_zero_is_greedy() -> None:
    greedy = decode_greedy(target(), other(), PROMPT, NEW, K)
    for rule in (Rejection, TargetOnly):
        for sampling in (Sampling(0.0), Sampling(0.0, top_k=1, top_p=0.5), Sampling(1e-3)):
            found = decode(target(), other(), PROMPT, NEW, K, (), rule(sampling, Chance(0)))
            assert found == greedy


def test_distribution() -> None:
    logits = torch.tensor([0.15, 0.5, 0.05, 0.3]).log()
    for sampling, expected in (
        (Sampling(), [0.15, 0.5, 0.05, 0.3]),
        (Sampling(top_k=2), [0, 0.625, 0, 0.375]),
        (Sampling(top_p=0.8), [0, 0.625, 0, 0.375]),
        (Sampling(top_p=0.81), [0.15 / 0.95, 0.5 / 0.95, 0, 0.3 / 0.95]),
        (Sampling(top_p=0.01), [0, 1, 0, 0]),
        # top-p looks at what top-k left: .625 of it is the first token.
        (Sampling(top_k=2, top_p=0.6), [0, 1, 0, 0]),
        (Sampling(0.5), [0.0225 / 0.365, 0.25 / 0.365, 0.0025 / 0.365, 0.09 / 0.365]),
        (Sampling(0.0), [0, 1, 0, 0]),
    ):
        found = sampling.distribution(logits)
        torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), atol=1e-6, rtol=0)
    tied = Sampling(top_k=1).distribution(torch.zeros(2, 3))
    assert tied.tolist() == [[1.0, 0.0, 0.0]] * 2


@pytest.mark.parametrize(
    "values", [{"temperature": -0.1}, {"temperature": float("inf")}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.1}]
)
def test_impossible_sampling_is_refused(values: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=str(next(iter(values.values())))) as caught:
        Sampling(**values)  # type: ignore[arg-type]
    assert caught.value.code == "SF-DECODE-SAMPLING"


@pytest.mark.parametrize("values", [{"threshold_single": 1.1}, {"threshold_acc": 0.0}])
def test_impossible_thresholds_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="SF-DECODE-SAMPLING"):
        TargetOnly(Sampling(), Chance(0), **values)


def test_chance_has_the_probabilities_it_is_given() -> None:
    """Bounds of four standard deviations (.014 at 20,000 draws), below a bias of 2 %."""
    chance, count = Chance(5), 20_000
    for probability in (0.1, 0.5, 0.9):
        assert abs(sum(chance.happens(probability) for _ in range(count)) / count - probability) < 0.014
    assert all(chance.happens(1.0) and not chance.happens(0.0) for _ in range(100))
    weights = torch.tensor([[0.2, 0.0, 0.6], [3.0, 1.0, 0.0]], dtype=torch.float64)
    drawn = chance.draw(weights.expand(count, 2, 3))
    shares = torch.stack([(drawn == token).double().mean(0) for token in range(3)], dim=1)
    expected = torch.tensor([[0.25, 0.0, 0.75], [0.75, 0.25, 0.0]], dtype=torch.float64)
    assert (shares - expected).abs().max() < 0.014
    assert not (drawn == 1)[:, 0].any()
    assert not (drawn == 2)[:, 1].any()
    assert torch.equal(Chance(5).draw(weights), Chance(5).draw(weights))


def test_sampled_decoding_repeats_with_its_seed() -> None:
    def run(seed: int) -> list[list[int]]:
        rules: list[Rule] = [rule(Sampling(), Chance(seed)) for rule in (Rejection, TargetOnly)]
        return [decode(target(), other(), PROMPT, NEW, K, (), rule).ids for rule in rules]

    assert run(1) == run(1)
    assert len({tuple(map(tuple, run(seed))) for seed in range(20)}) > 3
