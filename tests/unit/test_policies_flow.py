"""Leases, retries, breakers, credits, fairness and launches: pure decisions, model-checked with hypothesis."""

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specfleet.contracts.errors import ConfigError
from specfleet.contracts.states import TaskState
from specfleet.policies.breaker import (
    FAILURES_TO_OPEN,
    FIRST_BACKOFF_MS,
    MAX_BACKOFF_MS,
    PROBE_TIMEOUT_MS,
    Breaker,
    BreakerState,
)
from specfleet.policies.credits import CreditGate, Held, Marks, check_window_fits, derive_marks
from specfleet.policies.fair import Share, fair_order
from specfleet.policies.launches import AgentSlots, place, relaunch_delay_ms
from specfleet.policies.leases import LeasePolicy
from specfleet.policies.retries import Failure, judge, outcome


def test_lease_ends_strictly_after_its_deadline() -> None:
    lease = LeasePolicy(2.5)
    assert lease.deadline_ms(1_000) == 3_500
    assert not lease.expired(3_500, 3_500)
    assert lease.expired(3_500, 3_501)
    assert lease.restart_deadline_ms(1, 10_000) == 12_500
    assert lease.restart_deadline_ms(99_999, 10_000) == 99_999


def test_only_sample_failures_cost_the_prompt() -> None:
    failures = 0
    for _ in range(50):
        verdict = judge(Failure.INFRA, failures, budget=3)
        assert (verdict.state, verdict.failures, verdict.blames_worker) == (TaskState.READY, 0, True)
        assert judge(Failure.RETURNED, failures, 3) == judge(Failure.RETURNED, 0, 3)
    states = []
    for _ in range(3):
        verdict = judge(Failure.SAMPLE, failures, budget=3)
        failures = verdict.failures
        states.append(verdict.state)
        assert not verdict.blames_worker
    assert states == [TaskState.READY, TaskState.READY, TaskState.DEAD]


def test_outcome_weighs_dead_prompts_last() -> None:
    assert outcome(0, 100, 0.0) == "SUCCEEDED"
    assert outcome(1, 100, 0.01) == "DEGRADED"
    assert outcome(2, 100, 0.01) == "FAILED"


class TestBreaker:
    def test_opens_probes_backs_off_and_closes(self) -> None:
        breaker, now = Breaker(), 0
        for _ in range(FAILURES_TO_OPEN - 1):
            breaker.failed(now)
        assert breaker.may_pull(now)
        breaker.failed(now)
        assert not breaker.may_pull(now)
        assert not breaker.may_pull(now + FIRST_BACKOFF_MS - 1)
        now += FIRST_BACKOFF_MS
        assert breaker.may_pull(now)
        assert breaker.state is BreakerState.HALF_OPEN
        breaker.failed(now)
        assert not breaker.may_pull(now + 2 * FIRST_BACKOFF_MS - 1)
        assert breaker.may_pull(now + 2 * FIRST_BACKOFF_MS)
        breaker.succeeded()
        assert (breaker.state, breaker.failures, breaker.backoff_ms) == (BreakerState.CLOSED, 0, FIRST_BACKOFF_MS)

    def test_a_success_between_failures_keeps_it_closed(self) -> None:
        breaker = Breaker()
        for _ in range(20):
            breaker.failed(0)
            breaker.failed(0)
            breaker.succeeded()
        assert breaker.may_pull(0)

    def test_a_probe_that_never_ends_is_given_up(self) -> None:
        breaker = Breaker(BreakerState.OPEN, 3, FIRST_BACKOFF_MS, 0)
        assert breaker.may_pull(0)
        assert breaker.may_pull(PROBE_TIMEOUT_MS)
        assert breaker.until_ms == 2 * PROBE_TIMEOUT_MS

    @given(st.lists(st.tuples(st.sampled_from(["fail", "succeed", "ask"]), st.integers(0, 5_000)), max_size=60))
    def test_never_stays_open_for_longer_than_the_longest_back_off(self, events: list[tuple[str, int]]) -> None:
        breaker, now = Breaker(), 0
        for event, wait_ms in events:
            now += wait_ms
            if event == "fail":
                breaker.failed(now)
            elif event == "succeed":
                breaker.succeeded()
            else:
                breaker.may_pull(now)
            assert Breaker.from_dict(breaker.to_dict()) == breaker
        assert breaker.may_pull(now + MAX_BACKOFF_MS)


class TestCredits:
    def test_marks_are_derived_from_the_share_of_the_pool(self) -> None:
        marks = derive_marks(high_bytes=0, low_bytes=0, high_samples=8, low_samples=4, capacity_bytes=1_000)
        assert marks == Marks(637, 850, 4, 8)
        half = derive_marks(high_bytes=900, low_bytes=0, high_samples=8, low_samples=4, capacity_bytes=1_000, sharing=2)
        assert (half.low_bytes, half.high_bytes) == (318, 425)

    def test_a_window_that_cannot_fit_is_refused_with_every_number(self) -> None:
        marks = Marks(low_bytes=700, high_bytes=850, low_samples=4, high_samples=8)
        facts = {"capacity_bytes": 1_000, "bytes_per_token": 10, "store": "pool"}
        check_window_fits(marks, window_samples=4, window_bytes=700, **facts)
        with pytest.raises(ConfigError) as refused:
            check_window_fits(marks, window_samples=4, window_bytes=701, **facts)
        for number in ("4 samples", "701 bytes", "10 bytes per token", "700 bytes", "850 bytes", "'pool' holds 1000"):
            assert number in refused.value.message
        with pytest.raises(ConfigError, match="5 samples"):
            check_window_fits(marks, window_samples=5, window_bytes=1, **facts)

    def test_hysteresis(self) -> None:
        marks, gate = Marks(50, 100, 50, 100), CreditGate()
        assert gate.admit(marks, Held(90, 9), 10)
        assert not gate.admit(marks, Held(100, 10), 10)
        assert not gate.admit(marks, Held(60, 6), 10)
        assert gate.admit(marks, Held(60, 6), 10, urgent=True)
        assert not gate.admit(marks, Held(100, 10), 10, urgent=True)
        assert gate.admit(marks, Held(50, 5), 10)
        assert gate.admit(marks, Held(60, 6), 10)

    @settings(max_examples=200, deadline=None)
    @given(
        lengths=st.lists(st.integers(1, 40), min_size=1, max_size=120),
        window=st.integers(1, 8),
        spare_bytes=st.integers(0, 80),
        spare_samples=st.integers(0, 8),
        low_share=st.floats(0.3, 1.0),
    )
    def test_bounded_and_live(
        self, lengths: list[int], window: int, spare_bytes: int, spare_samples: int, low_share: float
    ) -> None:
        """For any lengths and any marks that admit the largest window, everything is trained and no mark is passed."""
        largest = sum(sorted(lengths, reverse=True)[:window])
        marks = Marks(
            low_bytes=largest + int(spare_bytes * low_share),
            high_bytes=largest + spare_bytes,
            low_samples=window + int(spare_samples * low_share),
            high_samples=window + spare_samples,
        )
        waiting, captured, trained, gate = deque(lengths), deque[int](), 0, CreditGate()
        while trained < len(lengths):
            before = (len(waiting), trained)
            while waiting and gate.admit(marks, Held(sum(captured), len(captured)), waiting[0]):
                captured.append(waiting.popleft())
                assert sum(captured) <= marks.high_bytes
                assert len(captured) <= marks.high_samples
            if len(captured) >= window or not waiting:
                for _ in range(min(window, len(captured))):
                    captured.popleft()
                    trained += 1
            assert (len(waiting), trained) != before, "no progress"


def test_fair_order_serves_the_least_served_per_weight() -> None:
    shares = [Share(1, 10), Share(2, 10, weight=2.0), Share(3, 0), Share(4, 0)]
    assert fair_order(shares) == [3, 4, 2, 1]


@given(st.lists(st.tuples(st.floats(0.5, 4.0), st.integers(1, 200)), min_size=1, max_size=6))
def test_fair_order_converges_to_the_weights(runs: list[tuple[float, int]]) -> None:
    """Handing out one credit at a time keeps every run within one turn of its share."""
    held = [0] * len(runs)
    for _ in range(200):
        order = fair_order(Share(i, held[i], weight) for i, (weight, _) in enumerate(runs))
        held[order[0]] += 1
    per_weight = [h / weight for h, (weight, _) in zip(held, runs, strict=True)]
    assert max(per_weight) - min(per_weight) <= max(1 / weight for weight, _ in runs) + 1e-9


class TestPlace:
    def test_one_node_if_any_has_room_the_tightest_first(self) -> None:
        agents = [AgentSlots("big", 8), AgentSlots("small", 2)]
        assert [(p.agent_id, p.nproc) for p in place(2, agents) or []] == [("small", 2)]

    def test_spreads_evenly_or_waits(self) -> None:
        agents = [AgentSlots("a", 2), AgentSlots("b", 3), AgentSlots("c", 0)]
        placed = place(4, agents)
        assert placed is not None
        assert [(p.agent_id, p.node_rank, p.nproc) for p in placed] == [("a", 0, 2), ("b", 1, 2)]
        assert place(5, agents) is None

    @given(st.integers(1, 12), st.lists(st.integers(0, 8), max_size=6))
    def test_never_oversubscribes(self, world: int, free: list[int]) -> None:
        placed = place(world, [AgentSlots(f"n{i}", slots) for i, slots in enumerate(free)])
        if placed is None:
            assert max(free, default=0) < world
            return
        assert sum(p.nproc for p in placed) == world
        assert len({p.agent_id for p in placed}) == len(placed)
        assert all(p.nproc <= free[int(p.agent_id[1:])] for p in placed)
        assert [p.node_rank for p in placed] == list(range(len(placed)))

    def test_relaunch_delay_grows_and_is_bounded(self) -> None:
        delays = [relaunch_delay_ms(n) for n in range(12)]
        assert delays[:4] == [0, 1_000, 2_000, 4_000]
        assert delays == sorted(delays)
        assert delays[-1] == 30_000
