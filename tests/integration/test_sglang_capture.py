"""Capture through real SGLang servers on a CPU: exact tensors, and every way a server can be lost or wrong."""

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
import torch
from fixtures.capture_rig import Rig
from fixtures.capture_site import LAYERS, CaptureSite, contract_of, prompts
from fixtures.cutter import Cutter
from fixtures.fake_capture_control import FakeCaptureControl
from fixtures.net import NatsServer, free_port
from fixtures.sglang import sglang_python, sglang_version
from fixtures.tiny import make_tiny_target
from transformers import AutoModelForCausalLM

from specfleet.capture.engines.serving import start_server
from specfleet.capture.engines.sglang import SGLangEngine
from specfleet.capture.engines.table import EngineOptions, engine_loader
from specfleet.contracts.capture import feature_table
from specfleet.contracts.errors import EngineError, StoreError
from specfleet.contracts.ids import task_key
from specfleet.sglang.launch import Server
from specfleet.store.base import FeatureStore
from specfleet.store.factory import open_store
from specfleet.wire.records_pb2 import PromptTask, SampleRef, TaskAttempt

pytestmark = [pytest.mark.integration, pytest.mark.sglang, pytest.mark.timeout(400)]


def assert_equals_transformers(store: FeatureStore, ref: SampleRef, ids: list[int], target: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    tensors = store.get(ref)
    with torch.no_grad():
        states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    expected = torch.cat([states[layer + 1][0] for layer in LAYERS], dim=-1)
    torch.testing.assert_close(tensors["aux_states"], expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(tensors["final_state"], states[-1][0], rtol=1e-4, atol=1e-4)
    assert tensors["input_ids"].tolist() == ids
    assert tensors["loss_mask"].tolist() == [1] * len(ids)


# -- a server of the worker's own ----------------------------------------------------------------------------------


@pytest.fixture
async def site(tiny_target: Path, nats_server: NatsServer, tmp_path: Path) -> AsyncIterator[CaptureSite]:
    site = CaptureSite(tiny_target, nats_server, f"file://{tmp_path}/pool?capacity={4 << 20}", engine="sglang")
    await site.open()
    yield site
    await site.close()


def servers_of(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


async def test_own_server_exact_tensors_then_killed_with_requests_under_way(
    site: CaptureSite, tiny_target: Path, tmp_path: Path
) -> None:
    await site.start("--sglang-log", str(tmp_path / "sglang.log"))
    texts = prompts(12, seed=1)
    names = [await site.send(i, ids) for i, ids in enumerate(texts)]
    bad = await site.send(100, [1, 2, 9999])
    # The tiny target's configuration allows 2048 positions, and all of them can be used.
    longest = await site.send(101, [7] * 2048)
    too_long = await site.send(102, [7] * 2049)
    await site.control.until(lambda: {bad, too_long} <= set(site.control.failures), timeout_s=180)
    refs = await site.refs([*names, longest])
    assert {kind for kind, _ in site.control.failures.values()} == {"SAMPLE"}
    assert "2049 tokens" in site.control.failures[too_long][1]
    for name, ids in list(zip(names, texts, strict=True))[:4]:
        assert_equals_transformers(site.store, refs[name], ids, tiny_target)
    # The canary left nothing behind.
    assert site.store.stats().used_bytes == sum(ref.num_bytes for ref in refs.values())

    # No room: requests stay under way. Then the server dies.
    site.fill()
    waiting = [await site.send(200 + i, ids) for i, ids in enumerate(prompts(4, seed=2))]
    await site.control.until(lambda: set(waiting) <= set(site.control.claims))
    assert site.process is not None
    servers = servers_of(site.process.pid)
    [main] = psutil.Process(site.process.pid).children()
    main.kill()
    await site.control.until(lambda: set(waiting) <= set(site.control.failures))
    assert {site.control.failures[name][0] for name in waiting} == {"INFRA"}
    assert len([call for call in site.control.fail_calls if set(call) & set(waiting)]) == 1
    assert not psutil.wait_procs(servers, timeout=20)[1]

    # The next server is being started; a worker that dies now takes it along.
    pid = site.process.pid
    await site.control.until(lambda: bool(servers_of(pid)))
    servers = servers_of(pid)
    await site.kill(signal.SIGKILL)
    assert not psutil.wait_procs(servers, timeout=20)[1]


# -- servers that run already --------------------------------------------------------------------------------------

POOL_BYTES = 16 << 20
attached = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("attached")


@pytest.fixture(scope="module")
def store_url(folder: Path) -> str:
    return f"file://{folder}/pool?capacity={POOL_BYTES}"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(folder: Path, store_url: str, tiny_target: Path) -> AsyncIterator[Server]:
    options = EngineOptions(
        "sglang",
        device="cpu",
        store_url=store_url,
        sglang_python=sglang_python(),
        sglang_log=str(folder / "sglang.log"),
    )
    server = await start_server(options, contract_of(tiny_target, "sglang"))
    yield server
    await server.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def cutter(server: Server) -> AsyncIterator[Cutter]:
    async with Cutter(server.url) as cutter:
        yield cutter


@pytest_asyncio.fixture(loop_scope="module")
async def rig(request: pytest.FixtureRequest, cutter: Cutter, store_url: str, tiny_target: Path) -> AsyncIterator[Rig]:
    control = FakeCaptureControl(contract_of(tiny_target, "sglang"))
    store = open_store(store_url)
    rig = Rig(control, await control.start(), f"rig-{request.node.name}", store)
    rig.load = engine_loader(EngineOptions("sglang", store_url=store_url, servers=(cutter.url,)))
    yield rig
    await rig.finish()
    await rig.client.close()
    await control.stop()
    store.close()


@attached
async def test_a_lost_answer_ends_the_attempt_and_the_next_one_is_captured(
    rig: Rig, cutter: Cutter, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specfleet.capture.worker.LOAD_RETRY_S", (0.05,))
    rig.start()
    [ids] = prompts(1, seed=5)
    first = await rig.send(0, ids)
    ref = (await rig.refs(1))[first]
    assert_equals_transformers(rig.store, ref, ids, tiny_target)
    assert f"sglang {sglang_version()} float32 tp 1" in rig.control.attested[0].engine_version
    assert rig.control.attested[0].plugin_version.startswith("specfleet ")

    cutter.cut = True
    lost = await rig.send(1, ids)
    await rig.control.until(lambda: lost in rig.control.failures)
    assert rig.control.failures[lost][0] == "INFRA"
    again = await rig.send(1, ids, attempt=2)
    assert list(await rig.refs(1)) == [again]
    # Its objects are there, under the keys of an attempt that no longer counts; the coordinator deletes those.
    used = rig.store.stats().used_bytes
    assert used == 3 * ref.num_bytes
    keys = [spec.key.replace("/a1/", f"/{part}/") for part in ("a1",) for spec in ref.features]
    lost_keys = [key.replace("p000000000", "p000000001") for key in keys]
    assert rig.store.remove(lost_keys) == []
    assert rig.store.stats().used_bytes == 2 * ref.num_bytes
    assert len(rig.control.attested) == 2


@attached
async def test_a_server_that_hangs_is_given_up_until_it_answers(
    rig: Rig, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specfleet.capture.worker.LOAD_RETRY_S", (0.2,))
    monkeypatch.setattr("specfleet.capture.engines.sglang.REQUEST_S", 1.0)
    monkeypatch.setattr("specfleet.sglang.client.PROBE_S", 2.0)
    rig.start()
    await rig.control.until(lambda: len(rig.control.attested) == 1, timeout_s=60)
    schedulers = psutil.Process(server.pid).children(recursive=True)
    for process in schedulers:
        process.suspend()
    try:
        name = await rig.send(0, [1, 2, 3])
        await rig.control.until(lambda: name in rig.control.failures, timeout_s=60)
        assert rig.control.failures[name][0] == "INFRA"
        assert not rig.worker.ready()[0]
    finally:
        for process in schedulers:
            process.resume()
    monkeypatch.undo()
    again = await rig.send(0, [1, 2, 3], attempt=2)
    assert list(await rig.refs(1)) == [again]


@attached
async def test_another_model_behind_the_url_is_refused(rig: Rig, folder: Path) -> None:
    other = make_tiny_target(folder / "other", seed=1)
    rig.control.contract = contract_of(other, "sglang")
    await refused(rig, "weights_hash")


@attached
async def test_other_layers_than_the_contracts_are_refused(rig: Rig, tiny_target: Path) -> None:
    rig.control.contract = contract_of(tiny_target, "sglang", layers=(0, 2))
    await refused(rig, "layers: expected [0, 2], measured [1, 2, 4]")


async def refused(rig: Rig, why: str) -> None:
    rig.start()
    await rig.control.until(lambda: len(rig.control.attested) == 1, timeout_s=60)
    await rig.send(0, [1, 2])
    seen = len(rig.control.heartbeats)
    await rig.control.until(lambda: len(rig.control.heartbeats) > seen + 5)
    assert rig.control.claim_calls == []
    assert why in rig.worker.ready()[1]


@attached
async def test_a_server_that_writes_elsewhere_is_refused(server: Server, folder: Path, tiny_target: Path) -> None:
    elsewhere = open_store(f"file://{folder}/another?capacity={POOL_BYTES}")
    loader = engine_loader(EngineOptions("sglang", servers=(server.url,)))
    with pytest.raises(StoreError, match="another"):
        await loader(contract_of(tiny_target, "sglang"), elsewhere)
    elsewhere.close()


@attached
async def test_keys_are_written_once(server: Server, store_url: str, tiny_target: Path) -> None:
    contract, store = contract_of(tiny_target, "sglang"), open_store(store_url)
    engine = await engine_loader(EngineOptions("sglang", servers=(server.url, "http://127.0.0.1:9")))(contract, store)
    assert isinstance(engine, SGLangEngine)
    attempt = TaskAttempt(task=task_key("twice", 0, 0), attempt=1)
    task = PromptTask(attempt=attempt, input_ids=[5, 6, 7], loss_mask=b"\0\1\1", store=store.name)
    specs = await engine.capture(task)
    assert [spec.name for spec in specs] == list(feature_table(contract))
    with pytest.raises(EngineError, match="written once"):
        await engine.capture(task)
    await engine.close()
    store.close()


@attached
async def test_a_server_that_was_away_is_taken_in_when_it_answers(
    server: Server, store_url: str, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specfleet.capture.engines.sglang.WATCH_S", 0.1)
    contract, store, port = contract_of(tiny_target, "sglang"), open_store(store_url), free_port()
    load = engine_loader(EngineOptions("sglang", servers=(server.url, f"http://127.0.0.1:{port}")))
    one = await load(contract, store)
    assert isinstance(one, SGLangEngine)
    async with Cutter(server.url, port):
        await asyncio.wait_for(one.lost.wait(), 20)
        both = await load(contract, store)
        assert isinstance(both, SGLangEngine)
        assert both.most_tokens == 2 * one.most_tokens
        assert not both.lost.is_set()
        await both.close()
    await one.close()
    store.close()
