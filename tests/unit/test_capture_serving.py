"""Engines that store features themselves: many requests under way, failures by kind, loss and reload."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import torch
from fixtures.capture_rig import BAD, CRASH, Rig, contract_of
from fixtures.fake_capture_control import FakeCaptureControl

from specfleet.capture.engines.base import ServingEngine
from specfleet.contracts.errors import CaptureItemError, EngineError, StoreFullError, UnreachableError
from specfleet.contracts.ids import sample_id
from specfleet.store.base import FeatureStore
from specfleet.wire.records_pb2 import CaptureContract, FeatureSpec, PromptTask

DEATH, LIE = 77, 55


class StoringEngine(ServingEngine):
    """Token 13: the prompt's fault. 66: the server's. 77: its end. 55: stores one row less. `gate` holds requests."""

    version, plugin_version = "storing 1", "plugin 1"
    most_tokens = 1 << 20

    def __init__(self, contract: CaptureContract, store: FeatureStore) -> None:
        self.contract, self.store = contract, store
        self.lost, self.gate = asyncio.Event(), asyncio.Event()
        self.gate.set()
        self.under_way: set[str] = set()
        self.most_under_way = 0
        self.full_answers = 0
        self.closed = False

    def attest(self) -> CaptureContract:
        return self.contract

    async def capture(self, task: PromptTask) -> list[FeatureSpec]:
        name = sample_id(task.attempt)
        self.under_way.add(name)
        self.most_under_way = max(self.most_under_way, len(self.under_way))
        try:
            await self.gate.wait()
            return self._store(task)
        finally:
            self.under_way.discard(name)

    def _store(self, task: PromptTask) -> list[FeatureSpec]:
        if DEATH in task.input_ids:
            self.lost.set()
        if self.lost.is_set():
            raise UnreachableError("SF-SGLANG-UNREACHABLE", "connection reset")
        if BAD in task.input_ids:
            raise CaptureItemError("SF-CAPTURE-NONFINITE", "NaN")
        if CRASH in task.input_ids:
            raise EngineError("SF-SGLANG-HTTP", "500")
        if self.full_answers:
            self.full_answers -= 1
            raise StoreFullError("SF-STORE-FULL", "full")
        tokens = len(task.input_ids)
        rows = tokens - 1 if LIE in task.input_ids else tokens
        features = {
            # Not in the table's order.
            "final_state": torch.zeros(rows, 4), "aux_states": torch.ones(rows, 8),
            "input_ids": torch.tensor(list(task.input_ids), dtype=torch.int32),
            "loss_mask": torch.ones(tokens, dtype=torch.uint8),
        }  # fmt: skip
        return self.store.put(task.attempt, features)

    async def close(self) -> None:
        self.closed = True


@pytest.fixture
def engines() -> list[StoringEngine]:
    return []


@pytest.fixture
async def rig(request: pytest.FixtureRequest, engines: list[StoringEngine]) -> AsyncIterator[Rig]:
    control = FakeCaptureControl(contract_of())
    rig = Rig(control, await control.start(), f"rig-{request.node.name}")

    async def load(contract: CaptureContract, store: FeatureStore) -> StoringEngine:
        engines.append(StoringEngine(rig.attests(contract), store))
        if rig.gated:
            engines[-1].gate.clear()
        return engines[-1]

    rig.load = load
    yield rig
    for engine in engines:
        engine.gate.set()
    await rig.finish()
    await rig.client.close()
    await control.stop()


async def test_requests_run_side_by_side_and_their_features_are_announced(
    rig: Rig, engines: list[StoringEngine]
) -> None:
    rig.gated = True
    names = [await rig.send(i, [i + 1] * 4) for i in range(6)]
    rig.start()
    await rig.control.until(lambda: len(rig.control.claims) == 6)
    await rig.control.until(lambda: len(engines[0].under_way) == 6)
    engines[0].gate.set()
    refs = await rig.refs(6)
    assert sorted(refs) == sorted(names)
    assert [spec.name for spec in refs[names[0]].features] == ["input_ids", "loss_mask", "aux_states", "final_state"]
    assert rig.store.get(refs[names[3]])["input_ids"].tolist() == [4] * 4
    assert (rig.control.attested[0].engine_version, rig.control.attested[0].plugin_version) == ("storing 1", "plugin 1")
    await rig.control.until(lambda: rig.control.heartbeats[-1].numbers["in_hand"] == 0)
    assert await rig.prompts_left() == 0


async def test_the_window_bounds_what_is_under_way(rig: Rig, engines: list[StoringEngine]) -> None:
    rig.gated, rig.control.max_batch_tokens = True, 8
    for i in range(6):
        await rig.send(i, [i + 1] * 4)
    rig.start()
    await rig.control.until(lambda: bool(engines) and len(engines[0].under_way) == 2)
    seen = len(rig.control.heartbeats)
    await rig.control.until(lambda: len(rig.control.heartbeats) > seen + 5)
    assert engines[0].most_under_way == 2
    engines[0].gate.set()
    assert len(await rig.refs(6)) == 6


async def test_failures_cost_whom_they_should(rig: Rig) -> None:
    bad, crash, lie = [await rig.send(i, [token, 2]) for i, token in enumerate((BAD, CRASH, LIE))]
    good = await rig.send(9, [3, 4])
    rig.start()
    assert list(await rig.refs(1)) == [good]
    await rig.control.until(lambda: len(rig.control.failures) == 3)
    assert rig.control.failures[bad] == ("SAMPLE", "[SF-CAPTURE-NONFINITE] NaN")
    assert rig.control.failures[crash] == ("INFRA", "EngineError: [SF-SGLANG-HTTP] 500")
    assert rig.control.failures[lie][0] == "SAMPLE"
    assert "float32 [1, 8]; 2 tokens need float32 [2, 8]" in rig.control.failures[lie][1]


async def test_a_full_pool_is_waited_for(rig: Rig, engines: list[StoringEngine]) -> None:
    rig.gated = True
    name = await rig.send(0, [1, 2])
    rig.start()
    await rig.control.until(lambda: bool(engines) and bool(engines[0].under_way))
    engines[0].full_answers = 4
    engines[0].gate.set()
    assert list(await rig.refs(1)) == [name]
    assert rig.control.failures == {}
    assert engines[0].full_answers == 0


async def test_what_a_revoked_attempt_stored_is_announced_to_be_deleted(rig: Rig, engines: list[StoringEngine]) -> None:
    rig.gated = True
    name = await rig.send(0, [1, 2])
    rig.start()
    await rig.control.until(lambda: bool(engines) and bool(engines[0].under_way))
    rig.control.revoke = [name]
    await rig.control.until(lambda: not rig.control.heartbeats[-1].claims)
    engines[0].gate.set()
    assert list(await rig.refs(1)) == [name]


async def test_a_lost_engine_is_loaded_anew(
    rig: Rig, engines: list[StoringEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specfleet.capture.worker.LOAD_RETRY_S", (0.05,))
    rig.gated = True
    names = [await rig.send(i, [token, 2]) for i, token in enumerate((DEATH, 3, 4))]
    rig.start()
    await rig.control.until(lambda: bool(engines) and len(engines[0].under_way) == 3)
    rig.gated = False
    engines[0].gate.set()
    await rig.control.until(lambda: len(rig.control.failures) == 3)
    # One event for the breaker, whatever was under way.
    assert rig.control.fail_calls == [sorted(names)]
    assert {kind for kind, _ in rig.control.failures.values()} == {"INFRA"}
    again = await rig.send(1, [3, 2], attempt=2)
    assert list(await rig.refs(1)) == [again]
    assert [engine.closed for engine in engines] == [True, False]
    assert len(rig.control.attested) == 2
    assert rig.worker.ready()[0]


async def test_a_server_that_comes_back_as_another_captures_nothing(
    rig: Rig, engines: list[StoringEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specfleet.capture.worker.LOAD_RETRY_S", (0.05,))
    rig.start()
    await rig.control.until(lambda: len(rig.control.attested) == 1)
    rig.attests = lambda contract: contract_of("other weights")
    engines[0].lost.set()
    await rig.control.until(lambda: len(rig.control.attested) == 2)
    await rig.send(0, [1, 2])
    seen = len(rig.control.heartbeats)
    await rig.control.until(lambda: len(rig.control.heartbeats) > seen + 5)
    assert rig.control.claim_calls == []
    assert "weights_hash" in rig.worker.ready()[1]


async def test_drain_announces_what_is_under_way_and_returns_the_rest(rig: Rig, engines: list[StoringEngine]) -> None:
    rig.gated, rig.control.max_batch_tokens = True, 8
    names = [await rig.send(i, [i + 1] * 4) for i in range(4)]
    rig.start()
    await rig.control.until(lambda: len(rig.control.claims) == 4 and len(engines[0].under_way) == 2)
    rig.stop.set()
    await rig.control.until(lambda: rig.control.heartbeats[-1].state == "DRAINING")
    engines[0].gate.set()
    await rig.finish()
    refs = await rig.refs(2)
    assert len(refs) == 2
    assert set(refs) | set(rig.control.failures) == set(names)
    assert {kind for kind, _ in rig.control.failures.values()} == {"RETURNED"}
    assert engines[0].closed


async def test_a_worker_that_stops_does_not_wait_for_its_engine(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specfleet.capture.worker.DRAIN_S", 1000.0)
    begun, undone = asyncio.Event(), asyncio.Event()

    async def slow(contract: CaptureContract, store: FeatureStore) -> StoringEngine:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            undone.set()
        raise AssertionError

    rig.load = slow
    rig.start()
    await asyncio.wait_for(begun.wait(), 20)
    await rig.finish()
    assert undone.is_set()
