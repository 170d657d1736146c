"""The worker's policy: claims, failures, back-pressure, drain, switch. Real gRPC, memory bus and store."""

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest
import torch
from fixtures.capture_rig import BAD, CRASH, Rig, contract_of
from fixtures.fake_capture_control import FakeCaptureControl

from specfleet.capture.reaper import Reaper
from specfleet.contracts.capture import contract_hash
from specfleet.contracts.errors import StoreError, StoreFullError
from specfleet.contracts.ids import feature_key, releases_subject, sample_id, task_key
from specfleet.wire.records_pb2 import CaptureContract, FeatureSpec, Release, TaskAttempt


@pytest.fixture
async def rig(request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    control = FakeCaptureControl(contract_of())
    rig = Rig(control, await control.start(), f"rig-{request.node.name}")
    yield rig
    for engine in rig.engines:
        engine.gate.set()
    await rig.finish()
    await rig.client.close()
    await control.stop()


async def test_captures_announces_and_acks(rig: Rig) -> None:
    names = [await rig.send(i, [i + 1] * (3 + i)) for i in range(5)]
    rig.start()
    refs = await rig.refs(5)
    assert sorted(refs) == sorted(names)
    ref = refs[names[2]]
    assert (ref.num_tokens, ref.num_loss_tokens, ref.worker_id) == (5, 5, "w1")
    assert ref.contract_hash == contract_hash(contract_of())
    tensors = rig.store.get(ref)
    assert list(tensors) == ["input_ids", "loss_mask", "aux_states", "final_state"]
    assert tensors["aux_states"].shape == (5, 8)
    assert tensors["aux_states"].unique().tolist() == [3.0]
    # One claim call for what was fetched together; batches obey max_batch_tokens (64).
    assert [sorted(call) for call in rig.control.claim_calls] == [sorted(names)]
    assert rig.engines[0].batches == [[7, 6, 5, 4, 3]]
    await rig.control.until(lambda: rig.control.heartbeats[-1].numbers["in_hand"] == 0)
    assert await rig.prompts_left() == 0
    assert rig.worker.ready() == (True, f"READY {ref.contract_hash}")
    stored = sum(ref.num_bytes for ref in refs.values())
    await rig.control.until(lambda: rig.control.heartbeats[-1].pool.used_bytes == stored)


async def test_refused_claims_are_acked_and_forgotten(rig: Rig) -> None:
    stale = await rig.send(0, [1, 2])
    good = await rig.send(1, [3, 4])
    rig.control.claimable = {good}
    rig.start()
    assert list(await rig.refs(1)) == [good]
    await rig.control.until(lambda: rig.control.heartbeats[-1].numbers["in_hand"] == 0)
    assert await rig.prompts_left() == 0
    assert rig.control.failures == {}
    assert stale not in rig.control.claims


async def test_a_bad_prompt_costs_itself_only(rig: Rig) -> None:
    bad = await rig.send(0, [BAD, 2])
    invalid = await rig.send(1, [500])
    good = await rig.send(2, [3, 4])
    rig.start()
    assert list(await rig.refs(1)) == [good]
    await rig.control.until(lambda: len(rig.control.failures) == 2)
    assert rig.control.failures[bad] == ("SAMPLE", "[SF-CAPTURE-NONFINITE] NaN")
    assert rig.control.failures[invalid][0] == "SAMPLE"
    assert await rig.prompts_left() == 0
    # The prompt outside the vocabulary never reached the engine.
    assert rig.engines[0].batches == [[2, 2]]


async def test_a_broken_engine_costs_no_prompt(rig: Rig) -> None:
    names = {await rig.send(i, ids) for i, ids in enumerate(([CRASH], [1]))}
    rig.start()
    await rig.control.until(lambda: set(rig.control.failures) == names)
    assert {kind for kind, _ in rig.control.failures.values()} == {"INFRA"}
    # The worker goes on with what is dispatched next.
    again = await rig.send(1, [1], attempt=2)
    assert list(await rig.refs(1)) == [again]


async def test_a_full_store_is_waited_for(rig: Rig) -> None:
    filler = TaskAttempt(task=task_key("other", 0, 0), attempt=1)
    capacity = rig.store.stats().capacity_bytes
    rig.store.put(filler, {"x": torch.zeros(capacity - 64, dtype=torch.uint8)})
    name = await rig.send(0, [1, 2, 3])
    rig.start()
    await rig.control.until(lambda: name in rig.control.claims)
    seen = len(rig.control.heartbeats)
    # Ten heartbeats later it is neither failed nor announced, and its lease is being renewed.
    await rig.control.until(lambda: len(rig.control.heartbeats) > seen + 10)
    assert rig.control.failures == {}
    assert [sample_id(claim) for claim in rig.control.heartbeats[-1].claims] == [name]
    rig.store.remove([feature_key(rig.store.name, filler, "x")])
    assert list(await rig.refs(1)) == [name]


async def test_a_failing_store_is_infrastructure(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(attempt: TaskAttempt, tensors: object) -> list[FeatureSpec]:
        raise StoreError("SF-STORE-RPC", "master gone")

    monkeypatch.setattr(rig.store, "put", refuse)
    name = await rig.send(0, [1, 2, 3])
    rig.start()
    await rig.control.until(lambda: name in rig.control.failures)
    assert rig.control.failures[name] == ("INFRA", "[SF-STORE-RPC] master gone")


async def test_drain_finishes_the_running_batch_and_returns_the_rest(rig: Rig) -> None:
    rig.gated = True
    rig.control.max_batch_tokens = 4
    names = [await rig.send(i, [i + 1] * 4) for i in range(4)]
    rig.start()
    await rig.control.until(lambda: len(rig.control.claims) == 4)
    assert await asyncio.to_thread(rig.engines[0].entered.wait, 10)
    rig.stop.set()
    await rig.control.until(lambda: rig.control.heartbeats[-1].state == "DRAINING")
    rig.engines[0].gate.set()
    await rig.finish()
    refs = await rig.refs(1)
    assert len(rig.engines[0].batches) == 1
    assert set(refs) | set(rig.control.failures) == set(names)
    assert len(refs) == 1
    assert {kind for kind, _ in rig.control.failures.values()} == {"RETURNED"}
    assert await rig.prompts_left() == 0
    assert rig.engines[0].closed


async def test_drain_returns_what_a_full_store_does_not_take(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(attempt: TaskAttempt, tensors: object) -> list[FeatureSpec]:
        raise StoreFullError("SF-STORE-FULL", "full")

    monkeypatch.setattr(rig.store, "put", full)
    name = await rig.send(0, [1, 2, 3])
    rig.start()
    await rig.control.until(lambda: name in rig.control.claims)
    await rig.finish()
    assert rig.control.failures[name][0] == "RETURNED"


async def test_a_revoked_attempt_is_dropped(rig: Rig) -> None:
    rig.gated = True
    rig.control.max_batch_tokens = 2
    names = [await rig.send(i, [i + 1] * 2) for i in range(2)]
    rig.start()
    await rig.control.until(lambda: len(rig.control.claims) == 2)
    rig.control.revoke = [names[1]]
    await rig.control.until(lambda: [sample_id(claim) for claim in rig.control.heartbeats[-1].claims] == [names[0]])
    rig.engines[0].gate.set()
    assert list(await rig.refs(1)) == [names[0]]
    await rig.control.until(lambda: rig.control.heartbeats[-1].numbers["in_hand"] == 0)
    assert rig.engines[0].batches == [[2]]
    assert rig.control.failures == {}


async def test_another_contract_means_another_engine(rig: Rig) -> None:
    rig.start()
    first = await rig.send(0, [1, 2])
    assert list(await rig.refs(1)) == [first]
    rig.control.contract = contract_of("other weights")
    second = await rig.send(1, [3, 4])
    assert list(await rig.refs(1)) == [second]
    assert [engine.closed for engine in rig.engines] == [True, False]
    new = contract_hash(contract_of("other weights"))
    await rig.control.until(lambda: rig.control.heartbeats[-1].contract_hash == new)


async def test_a_refused_attestation_captures_nothing(rig: Rig) -> None:
    rig.attests = lambda contract: contract_of("what is really on disk")
    await rig.send(0, [1, 2])
    rig.start()
    await rig.control.until(lambda: len(rig.control.attested) == 1)
    seen = len(rig.control.heartbeats)
    await rig.control.until(lambda: len(rig.control.heartbeats) > seen + 5)
    assert rig.control.claim_calls == []
    ready, why = rig.worker.ready()
    assert not ready
    assert "weights_hash: expected w, measured what is really on disk" in why


async def test_pulls_only_while_allowed(rig: Rig) -> None:
    rig.control.may_pull = False
    name = await rig.send(0, [1, 2])
    rig.start()
    await rig.control.until(lambda: len(rig.control.attested) == 1)
    seen = len(rig.control.heartbeats)
    await rig.control.until(lambda: len(rig.control.heartbeats) > seen + 5)
    assert rig.control.claim_calls == []
    rig.control.may_pull = True
    assert list(await rig.refs(1)) == [name]


async def test_a_forgetful_coordinator_is_told_again(rig: Rig) -> None:
    rig.start()
    await rig.control.until(lambda: len(rig.control.attested) == 1)
    rig.control.registered.clear()
    await rig.control.until(lambda: len(rig.control.attested) == 2)
    assert rig.control.registrations == 2
    name = await rig.send(0, [1, 2])
    assert list(await rig.refs(1)) == [name]


async def test_a_target_that_does_not_load_is_tried_again(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specfleet.capture.worker.LOAD_RETRY_S", (0.05,))
    fails = 2

    def flaky(contract: CaptureContract) -> CaptureContract:
        nonlocal fails
        fails -= 1
        if fails >= 0:
            raise OSError("no such directory")
        return contract

    rig.attests = flaky
    name = await rig.send(0, [1, 2])
    rig.start()
    assert list(await rig.refs(1)) == [name]


async def test_reaper_deletes_retries_and_confirms(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specfleet.capture.reaper.RETRY_S", 0.05)
    rig.start()
    names = [await rig.send(i, [1, 2]) for i in range(2)]
    refs = await rig.refs(2)
    real, busy = rig.store.remove, [True]

    def leased_once(keys: Sequence[str]) -> list[str]:
        return [keys[0]] if busy and busy.pop() else real(keys)

    monkeypatch.setattr(rig.store, "remove", leased_once)
    for outbox_id, name in enumerate(names, start=7):
        release = Release(outbox_id=outbox_id, store=rig.store.name, keys=[f.key for f in refs[name].features])
        await rig.bus.publish(releases_subject(rig.store.name), release.SerializeToString())
    reaping = asyncio.create_task(Reaper(rig.client, rig.bus, rig.store).run(rig.stop))
    await rig.control.until(lambda: sorted(rig.control.confirmed) == [7, 8])
    assert rig.store.stats().used_bytes == 0
    rig.stop.set()
    await reaping
    assert (await rig.bus.stream_info("RELEASES")).messages == 0
