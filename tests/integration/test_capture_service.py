"""The capture process against real NATS, real gRPC and a real store: exact tensors, outages, kill -9, drain."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from fixtures.fake_capture_control import FakeCaptureControl
from fixtures.net import NatsServer, free_port
from transformers import AutoModelForCausalLM

from specfleet.bus.base import Subscription
from specfleet.bus.factory import open_bus
from specfleet.contracts.capture import contract_hash
from specfleet.contracts.ids import feature_key, prompts_subject, releases_subject, sample_id, task_key
from specfleet.store.factory import open_store
from specfleet.target.facts import read_target_facts
from specfleet.wire.records_pb2 import CaptureContract, PromptTask, Release, SampleRef, TaskAttempt

pytestmark = pytest.mark.integration

RUN = "capture-test"
LAYERS = (1, 2, 4)
CAPACITY = 4 << 20


def contract_of(target: Path) -> CaptureContract:
    facts = read_target_facts(target)
    return CaptureContract(
        target=str(target), weights_hash=facts.weights_hash, tokenizer_hash=facts.tokenizer_hash, layers=LAYERS,
        final_state="post_norm", dtype="float32", hidden_size=facts.hidden_size,
        num_hidden_layers=facts.num_hidden_layers, vocab_size=facts.vocab_size, engine="hf",
    )  # fmt: skip


class Site:
    """A bus, a store, a coordinator that says yes, and a capture process that may be killed and started again."""

    def __init__(self, target: Path, nats: NatsServer, store_url: str) -> None:
        self.nats, self.store_url = nats, store_url
        self.control = FakeCaptureControl(contract_of(target))
        self.control.max_batch_tokens = 256
        self.address = f"127.0.0.1:{free_port()}"
        self.bus, self.store = open_bus(nats.url), open_store(store_url)
        self.process: asyncio.subprocess.Process | None = None
        self.samples: Subscription | None = None

    async def open(self) -> None:
        await self.control.start(self.address)
        await self.bus.connect()
        self.samples = await self.bus.subscribe("samples.*", "coordinator")

    async def start(self) -> None:
        """Starts the capture process; it reports to the coordinator when it is up."""
        env = os.environ | {"SPECFLEET_COORDINATOR": self.address, "SPECFLEET_NATS": self.nats.url}
        command = ["-m", "specfleet.capture", "--store", self.store_url, "--worker-id", "capture-0", "--device", "cpu"]
        self.process = await asyncio.create_subprocess_exec(sys.executable, *command, env=env)

    async def kill(self, number: signal.Signals) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        async with asyncio.timeout(40):
            return await self.process.wait()

    async def close(self) -> None:
        if self.process is not None and self.process.returncode is None:
            await self.kill(signal.SIGKILL)
        await self.bus.close()
        await self.control.stop()
        self.store.close()

    async def send(self, index: int, ids: list[int], attempt: int = 1) -> str:
        assert self.control.contract is not None
        key = TaskAttempt(task=task_key(RUN, 0, index), attempt=attempt)
        digest = contract_hash(self.control.contract)
        task = PromptTask(
            attempt=key, contract_hash=digest, input_ids=ids, loss_mask=b"\1" * len(ids), store=self.store.name
        )
        await self.bus.publish(prompts_subject(digest, RUN), task.SerializeToString(), message_id=sample_id(key))
        return sample_id(key)

    async def refs(self, names: list[str]) -> dict[str, SampleRef]:
        """The references of these samples; any other one is a failure."""
        assert self.samples is not None
        found: dict[str, SampleRef] = {}
        async with asyncio.timeout(90):
            while len(found) < len(names):
                for message in await self.samples.fetch(64, 1.0):
                    ref = SampleRef.FromString(message.data)
                    found[sample_id(ref.attempt)] = ref
                    await message.ack()
        assert sorted(found) == sorted(names)
        return found

    def fill(self) -> str:
        """Leaves no room in the pool; returns the key to remove."""
        filler = TaskAttempt(task=task_key("filler", 0, 0), attempt=1)
        free = CAPACITY - self.store.stats().used_bytes
        self.store.put(filler, {"x": torch.zeros(free - 16, dtype=torch.uint8)})
        return feature_key(self.store.name, filler, "x")


@pytest.fixture
async def site(tiny_target: Path, nats_server: NatsServer, tmp_path: Path) -> AsyncIterator[Site]:
    site = Site(tiny_target, nats_server, f"file://{tmp_path}/pool?capacity={CAPACITY}")
    await site.open()
    yield site
    await site.close()


def prompts(count: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 60, (count,), generator=generator).tolist()
    return [torch.randint(0, 384, (n,), generator=generator).tolist() for n in lengths]


async def test_exact_tensors_through_outages(site: Site, tiny_target: Path) -> None:
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


async def test_kill_and_drain_with_claims_in_hand(site: Site) -> None:
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
