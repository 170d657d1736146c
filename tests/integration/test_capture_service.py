"""The capture process against real NATS, real gRPC and a real store: exact tensors, outages, kill -9, drain."""

import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from fixtures.capture_site import CAPACITY, LAYERS, CaptureSite, prompts
from fixtures.net import NatsServer
from transformers import AutoModelForCausalLM

from specfleet.contracts.ids import releases_subject
from specfleet.wire.records_pb2 import Release

pytestmark = pytest.mark.integration


@pytest.fixture
async def site(tiny_target: Path, nats_server: NatsServer, tmp_path: Path) -> AsyncIterator[CaptureSite]:
    site = CaptureSite(tiny_target, nats_server, f"file://{tmp_path}/pool?capacity={CAPACITY}")
    await site.open()
    yield site
    await site.close()


async def test_exact_tensors_through_outages(site: CaptureSite, tiny_target: Path) -> None:
    await site.start()
    texts = prompts(12, seed=1)
    names = [await site.send(i, ids) for i, ids in enumerate(texts)]
    bad = await site.send(100, [1, 2, 9999])
    refs = await site.refs(names)
    await site.control.until(lambda: bad in site.control.failures)
    assert site.control.failures[bad][0] == "SAMPLE"

    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32).eval()
    for name, ids in zip(names, texts, strict=True):
        tensors = site.store.get(refs[name])
        with torch.no_grad():
            states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
        expected = torch.cat([states[layer + 1][0] for layer in LAYERS], dim=-1)
        torch.testing.assert_close(tensors["aux_states"], expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(tensors["final_state"], states[-1][0], rtol=1e-5, atol=1e-5)
        assert tensors["input_ids"].tolist() == ids
        assert tensors["loss_mask"].tolist() == [1] * len(ids)

    # The bus is killed and loses everything; the worker finds its way back.
    site.nats.kill()
    site.nats.wipe()
    site.nats.start()
    names = [await site.send(20 + i, ids) for i, ids in enumerate(prompts(4, seed=2))]
    refs = await site.refs(names)

    # The coordinator goes away and comes back without any memory of the worker.
    await site.control.stop()
    site.control.registered.clear()
    names = [await site.send(40 + i, ids) for i, ids in enumerate(prompts(4, seed=3))]
    attested = len(site.control.attested)
    await site.control.start(site.address)
    refs |= await site.refs(names)
    assert len(site.control.attested) > attested

    # The reaper deletes and confirms.
    keys = [feature.key for ref in refs.values() for feature in ref.features]
    used = site.store.stats().used_bytes
    release = Release(outbox_id=5, store=site.store.name, keys=keys)
    await site.bus.publish(releases_subject(site.store.name), release.SerializeToString())
    await site.control.until(lambda: site.control.confirmed == [5])
    assert site.store.stats().used_bytes == used - sum(ref.num_bytes for ref in refs.values())
    assert await site.kill(signal.SIGTERM) == 0


async def test_kill_and_drain_with_claims_in_hand(site: CaptureSite) -> None:
    texts = prompts(6, seed=4)
    key = site.fill()
    await site.start()
    first = [await site.send(i, ids) for i, ids in enumerate(texts)]
    await site.control.until(lambda: set(first) <= set(site.control.claims), timeout_s=90)
    await site.kill(signal.SIGKILL)

    # What the coordinator does when the leases run out: the same tasks, one attempt later; the old one is void.
    second = [await site.send(i, ids, attempt=2) for i, ids in enumerate(texts)]
    site.control.claimable = set(second)
    await site.start()
    await site.control.until(lambda: set(second) <= set(site.control.claims), timeout_s=90)
    assert await site.kill(signal.SIGTERM) == 0
    assert {name: kind for name, (kind, _) in site.control.failures.items()} == dict.fromkeys(second, "RETURNED")

    # Returned work is dispatched again; with room in the pool it goes through.
    site.store.remove([key])
    third = [await site.send(i, ids, attempt=3) for i, ids in enumerate(texts)]
    site.control.claimable = set(third)
    await site.start()
    refs = await site.refs(third)
    assert sum(ref.num_bytes for ref in refs.values()) == site.store.stats().used_bytes
    assert await site.kill(signal.SIGTERM) == 0
