"""Capture inside a real SGLang server on a CPU: exact whatever else the server does, and one bad prompt is one failure."""

import asyncio
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from fixtures.architectures import ARCHITECTURES, make_target
from fixtures.plugin_server import CONTEXT, RUN, PluginServer, plugin_server
from fixtures.pool import MooncakePool
from fixtures.sglang import sglang_python, sglang_version
from fixtures.tiny import make_tiny_target
from safetensors.torch import load_file, save_file

from specfleet.capture.sglang_plugin.releases import TESTED
from specfleet.contracts.errors import CaptureItemError, EngineError, HostError, StoreError
from specfleet.store.factory import open_store
from specfleet.wire.records_pb2 import PromptTask

pytestmark = [pytest.mark.integration, pytest.mark.sglang]

VOCAB = 384
NAN_TOKEN = 200
AUX_TOLERANCE, FINAL_TOLERANCE = 1e-5, 1e-5
LENGTHS = (1, 2, 15, 16, 17, 33, 64, 65, 100, 128, 199, 200, 5, 48)


def prompt(seed: int, length: int) -> list[int]:
    return [token for token in random.Random(seed).choices(range(VOCAB), k=length + 50) if token != NAN_TOKEN][:length]


async def assert_exact(server: PluginServer, seed: int) -> None:
    """Concurrent captures of every length, among ordinary requests that decode."""
    prompts = [prompt(seed + length, length) for length in LENGTHS]
    tasks = [server.task(ids) for ids in prompts]
    ordinary = [prompt(seed - number, 7 * number) for number in (1, 2, 3, 4)]
    alone = [(await server.generate(ids, 12))["output_ids"] for ids in ordinary]
    answers, beside = await asyncio.gather(
        asyncio.gather(*(server.capture(task) for task in tasks)),
        asyncio.gather(*(server.generate(ids, 12) for ids in ordinary)),
    )
    assert [answer["output_ids"] for answer in beside] == alone
    for ids, task, answer in zip(prompts, tasks, answers, strict=True):
        assert answer.num_tokens == len(ids)
        assert_equal(server, task, server.tensors(task, answer))


def assert_equal(server: PluginServer, task: PromptTask, found: dict[str, torch.Tensor]) -> None:
    expected = server.expected(list(task.input_ids))
    assert found["input_ids"].tolist() == list(task.input_ids)
    assert bytes(found["loss_mask"].tolist()) == task.loss_mask
    assert found.keys() == {"input_ids", "loss_mask", *expected}
    for name, tolerance in (("aux_states", AUX_TOLERANCE), ("final_state", FINAL_TOLERANCE)):
        wanted = expected[name]
        rounding = 2**-8 if found[name].dtype == torch.bfloat16 else 0.0
        assert found[name].shape == wanted.shape
        size = max(1.0, float(wanted.abs().max()))
        torch.testing.assert_close(found[name].float(), wanted, atol=tolerance * size, rtol=rounding)
    if "teacher_lse" in expected:
        torch.testing.assert_close(found["teacher_lse"], expected["teacher_lse"], atol=1e-5, rtol=1e-5)
        assert torch.equal(found["teacher_argmax"], expected["teacher_argmax"])


# One server for most of the cases: small chunks, batches that mix prefill and decoding, overlap, a warm radix cache, a pool
# of 1 MiB, and room for a few captures at a time.


@pytest.fixture(scope="module")
def fragile_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama that turns one token into NaN."""
    target = make_tiny_target(tmp_path_factory.mktemp("fragile"), tie_word_embeddings=False)
    weights = load_file(target / "model.safetensors")
    weights["model.embed_tokens.weight"][NAN_TOKEN] = float("nan")
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(fragile_target: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[PluginServer]:
    place = tmp_path_factory.mktemp("server")
    flags = ("--chunked-prefill-size", "16", "--enable-mixed-chunk", "--enable-return-hidden-states")
    url = f"file://{place}/pool?capacity={1 << 20}"
    async with plugin_server(
        fragile_target, url, place / "log", flags, pending_bytes=200_000, writer="process"
    ) as running:
        yield running


@pytest.fixture
def server(running: PluginServer) -> Iterator[PluginServer]:
    yield running
    running.empty()


shared = pytest.mark.asyncio(loop_scope="module")


@shared
async def test_small_chunks_mixed_batches_and_overlap(server: PluginServer) -> None:
    await assert_exact(server, seed=1)


@shared
async def test_a_warm_cache_shortens_no_capture(server: PluginServer) -> None:
    ids = prompt(2, 120)
    await server.generate(ids, 1)
    warm = await server.generate(ids, 1)
    assert warm["meta_info"]["cached_tokens"] > 100
    for _ in range(2):  # nor does an earlier capture
        task = server.task(ids)
        answer = await server.capture(task)
        assert_equal(server, task, server.tensors(task, answer))


@shared
async def test_ordinary_hidden_states_are_the_final_ones(server: PluginServer) -> None:
    """Of a request by itself: with others beside it, or in chunks, SGLang 0.5.14 mixes up the rows."""
    ids = prompt(999, 9)  # shares no prefix with a cached one
    plain = await server.generate(ids, 2, return_hidden_states=True)
    prefill = torch.tensor(plain["meta_info"]["hidden_states"][0])
    torch.testing.assert_close(prefill, server.expected(ids)["final_state"], atol=1e-5, rtol=1e-5)


@shared
async def test_only_the_features_asked_for(server: PluginServer) -> None:
    task = server.task(prompt(4, 20), features=["final_state", "input_ids"])
    answer = await server.capture(task)
    assert list(server.tensors(task, answer)) == ["input_ids", "final_state"]


@shared
async def test_nan_fails_its_prompt_alone(server: PluginServer) -> None:
    tasks = [server.task(prompt(50 + number, 40)) for number in range(5)]
    tasks[2].input_ids[25] = NAN_TOKEN
    results = await asyncio.gather(*(server.capture(task) for task in tasks), return_exceptions=True)
    failure = results.pop(2)
    bad = tasks.pop(2)
    assert isinstance(failure, CaptureItemError)
    assert failure.code == "SF-CAPTURE-NONFINITE"
    assert "of 40 tokens are NaN" in failure.message
    for task, answer in zip(tasks, results, strict=True):
        assert not isinstance(answer, BaseException)
        assert_equal(server, task, server.tensors(task, answer))
    assert not server.stored(bad)


@shared
async def test_an_attempt_is_captured_once(server: PluginServer) -> None:
    task = server.task(prompt(6, 30))
    answer = await server.capture(task)
    with pytest.raises(EngineError) as error:
        await server.capture(task)
    assert error.value.code == "SF-STORE-KEY-EXISTS"
    assert_equal(server, task, server.tensors(task, answer))


@shared
async def test_a_failed_put_spares_its_neighbours(server: PluginServer) -> None:
    tasks = [server.task(prompt(70 + number, 20)) for number in range(3)]
    blocked = server.folder(tasks[1])
    blocked.parent.mkdir(exist_ok=True)
    blocked.touch()  # a file where the store needs a folder
    results = await asyncio.gather(*(server.capture(task) for task in tasks), return_exceptions=True)
    failure = results[1]
    assert isinstance(failure, StoreError)
    assert failure.code == "SF-STORE-WRITE"
    for task, answer in ((tasks[0], results[0]), (tasks[2], results[2])):
        assert not isinstance(answer, BaseException)
        assert_equal(server, task, server.tensors(task, answer))


@shared
@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda task: task.input_ids.__setitem__(3, VOCAB), "SF-CAPTURE-TOKEN"),
        (lambda task: task.input_ids.__setitem__(3, -1), "SF-CAPTURE-TOKEN"),
        (lambda task: setattr(task, "loss_mask", b"\1"), "SF-CAPTURE-PROMPT"),
        (lambda task: task.features.append("logits"), "SF-CAPTURE-PROMPT"),
        (lambda task: task.input_ids.extend([5] * CONTEXT), "SF-CAPTURE-REFUSED"),
    ],
)
async def test_prompts_that_cannot_be_captured(server: PluginServer, change: object, code: str) -> None:
    task = server.task(prompt(8, 10))
    assert callable(change)
    change(task)
    with pytest.raises(CaptureItemError) as error:
        await server.capture(task)
    assert error.value.code == code


@shared
async def test_requests_that_no_prompt_is_to_blame_for(server: PluginServer) -> None:
    other_pool = server.task(prompt(9, 10))
    other_pool.store = "elsewhere"
    with pytest.raises(StoreError, match="SF-STORE-WRONG-POOL"):
        await server.capture(other_pool)
    wish = {"sample": f"{RUN}/e0000-p000000001/a1", "store": "pool", "loss_mask": "AAAA"}
    for more, raw in (({}, {**wish, "sample": "x"}), ({}, 7), ({"max_new_tokens": 3}, wish)):
        sampling = {"max_new_tokens": 1, "custom_params": {"specfleet_capture": raw}, **more}
        body = {"input_ids": [5, 6, 7], "sampling_params": sampling}
        [info] = (await server.client.generate(body, 60))["meta_info"]["specfleet_capture"]
        assert (info["ok"], info["code"], info["kind"]) == (False, "SF-SGLANG-REQUEST", "infra")
    assert not server.stored(other_pool)


@shared
async def test_a_full_pool_delays_captures_and_nothing_else(server: PluginServer) -> None:
    """The features of 200 tokens take 103 kB here: ten fit the pool, and one may be under way."""
    for number in range(10):
        await server.capture(server.task(prompt(100 + number, 200)))
    late = [server.task(prompt(120 + number, 200)) for number in range(4)]
    waiting = [asyncio.create_task(server.capture(task)) for task in late]
    for number in range(3):
        await server.generate(prompt(130 + number, 60), 4)
    assert not any(task.done() for task in waiting)
    server.empty()
    for task, answer in zip(late, await asyncio.gather(*waiting), strict=True):
        assert_equal(server, task, server.tensors(task, answer))


@shared
async def test_aborted_requests_leave_room_for_others(server: PluginServer) -> None:
    """More than may be under way: some run, some wait in the plugin, all are answered."""
    requests = [asyncio.create_task(server.capture(server.task(prompt(200 + n, 200)))) for n in range(12)]
    await server.generate(prompt(220, 8), 1)
    await server.client.post("/abort_request", {"abort_all": True}, 60)
    aborted = [
        answer for answer in await asyncio.gather(*requests, return_exceptions=True) if isinstance(answer, EngineError)
    ]
    assert aborted
    server.empty()
    tasks = [server.task(prompt(230 + number, 60)) for number in range(8)]
    for task, answer in zip(tasks, await asyncio.gather(*map(server.capture, tasks)), strict=True):
        assert_equal(server, task, server.tensors(task, answer))


# Other configurations


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("qwen3"), ARCHITECTURES["qwen3"]())


@pytest.fixture
def mooncake(request: pytest.FixtureRequest) -> Iterator[MooncakePool]:
    pool = MooncakePool(64 << 20)
    pool.start()
    yield pool
    pool.stop()


def test_qwen3_into_a_mooncake_pool_that_restarts(qwen3: Path, mooncake: MooncakePool, tmp_path: Path) -> None:
    async def run() -> None:
        flags = ("--chunked-prefill-size", "64")
        extras = ("teacher_argmax", "teacher_lse")
        async with plugin_server(qwen3, mooncake.url(), tmp_path / "log", flags, extras=extras) as running:
            await assert_exact(running, seed=1000)
            await assert_exact(running, seed=2000)
            mooncake.stop()
            with pytest.raises(StoreError):
                await running.capture(running.task(prompt(5, 30)))
            await asyncio.to_thread(mooncake.start)  # empty; the server goes on with it
            running.store.close()
            running.store = open_store(mooncake.url())
            await assert_exact(running, seed=4000)

    asyncio.run(run())


def test_whole_prompts_in_bfloat16_without_overlap(qwen3: Path, tmp_path: Path) -> None:
    async def run() -> None:
        # SGLang reserves memory for a whole prefill of 16k tokens, more than a small machine has.
        flags = ("--chunked-prefill-size", "-1", "--disable-overlap-schedule", "--mem-fraction-static", "0.5")
        url = f"file://{tmp_path}/pool"
        async with plugin_server(qwen3, url, tmp_path / "log", flags, dtype="bfloat16") as running:
            await assert_exact(running, seed=3000)

    asyncio.run(run())


def test_two_tensor_parallel_ranks_write_once(qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both hold the states, and a key can be written once: if both wrote, some attempt would end with SF-STORE-KEY-EXISTS."""
    # SGLang wants to know the cores of every rank where there are more ranks than NUMA nodes.
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|0")

    async def run() -> None:
        url, flags = f"file://{tmp_path}/pool", ("--tp-size", "2", "--chunked-prefill-size", "64")
        extras = ("teacher_argmax", "teacher_lse")
        async with plugin_server(qwen3, url, tmp_path / "log", flags, extras=extras) as running:
            assert (await running.client.facts()).tensor_parallel == 2
            await assert_exact(running, seed=5000)

    asyncio.run(run())


def test_a_final_state_that_the_head_sees_scaled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """muP: the state is divided before the head; features hold it as it was, the teacher's are of the head's own logits."""
    monkeypatch.setenv("SGLANG_EXTERNAL_MODEL_PACKAGE", "fixtures.sglang_models")
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    )
    llama = make_tiny_target(tmp_path / "llama", tie_word_embeddings=False)
    scaled = shutil.copytree(llama, tmp_path / "scaled")
    config = json.loads((llama / "config.json").read_text())
    (scaled / "config.json").write_text(json.dumps({**config, "architectures": ["ScaledLlamaForCausalLM"]}))

    async def run() -> None:
        url, extras = f"file://{tmp_path}/pool", ("teacher_lse",)
        async with plugin_server(scaled, url, tmp_path / "log", (), extras=extras) as running:
            task = running.task(prompt(7, 40))
            found = running.tensors(task, await running.capture(task))
            expected = running.expected(list(task.input_ids))
            for name in ("aux_states", "final_state"):
                torch.testing.assert_close(found[name], expected[name], atol=1e-5, rtol=1e-5)
            logits_TV = expected["final_state"] @ running.reference.head_VH.T / 4
            torch.testing.assert_close(found["teacher_lse"], logits_TV.logsumexp(-1), atol=1e-5, rtol=1e-5)

    asyncio.run(run())


# Fail closed


def test_a_layer_that_sglang_does_not_hand_out_ends_the_server(fragile_target: Path, tmp_path: Path) -> None:
    async def run() -> None:
        with pytest.raises(HostError, match="SF-SGLANG-START"):
            async with plugin_server(fragile_target, f"file://{tmp_path}/pool", tmp_path / "log", (), layers=(1, 5)):
                pytest.fail("the server became ready")

    asyncio.run(run())
    assert "specfleet: [SF-SGLANG-LAYERS] layer 5 cannot be captured" in (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    ("sabotage", "code"),
    [
        ("versions.TESTED = {'0.5.13': ()}", "SF-SGLANG-VERSION"),
        (
            "next(iter(versions.functions_of(versions.installed_version()))).__dict__['digest'] = '0' * 16",
            "SF-SGLANG-SOURCE",
        ),
        ("HookRegistry.apply_hooks = classmethod(lambda cls: None)", "SF-SGLANG-HOOK"),
    ],
)
def test_hooks_that_are_not_the_tested_ones_end_the_first_process(tmp_path: Path, sabotage: str, code: str) -> None:
    """SGLang itself logs the trouble of a plugin and serves on."""
    program = f"""
from specfleet.capture.sglang_plugin import versions
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.plugins import load_plugins
{sabotage}
load_plugins()
print("serves on")
"""
    env = {"SGLANG_USE_CPU_ENGINE": "1", "SPECFLEET_CAPTURE": f'{{"store": "file://{tmp_path}/pool", "layers": [1]}}'}
    done = subprocess.run([sglang_python(), "-c", program], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 3, done.stderr
    assert f"specfleet: [{code}]" in done.stderr
    assert done.stdout == ""


def test_verify_engine_tells_a_changed_sglang_from_the_tested_one(tmp_path: Path) -> None:
    def verify(**env: str) -> tuple[int, dict[str, bool]]:
        command = [
            sys.executable,
            "-m",
            "specfleet.ctl",
            "capture",
            "verify-engine",
            "--python",
            sglang_python(),
            "--json",
        ]
        done = subprocess.run(command, env=os.environ | env, capture_output=True, text=True, timeout=60)
        return done.returncode, {row["symbol"]: row["ok"] for row in json.loads(done.stdout)}

    code, found = verify()
    assert code == 0
    assert all(found.values())
    assert len(found) == 2 + len(TESTED[sglang_version()])

    program = "from specfleet.capture.sglang_plugin.versions import source_root; print(source_root())"
    root = subprocess.run([sglang_python(), "-c", program], capture_output=True, text=True, check=True).stdout.strip()
    for path in {function.place.partition(":")[0] for function in TESTED[sglang_version()]}:
        copy = tmp_path / "sglang" / "srt" / path
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(Path(root, path).read_text())
    (tmp_path / "sglang" / "__init__.py").touch()
    scheduler = tmp_path / "sglang" / "srt" / "managers" / "scheduler.py"
    scheduler.write_text(scheduler.read_text().replace("self.forward_ct += 1", "self.forward_ct += 2"))
    code, found = verify(PYTHONPATH=str(tmp_path))
    assert code == 1
    assert [symbol for symbol, ok in found.items() if not ok] == ["managers/scheduler.py:Scheduler.run_batch"]
