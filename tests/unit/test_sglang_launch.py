"""SGLang servers: command lines from facts, the interpreter, starts that fail; and what requests and answers mean."""

import asyncio
import base64
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from aiohttp import web
from fixtures.net import free_port

from specfleet.capture.engines.requests import capture
from specfleet.capture.engines.serving import CPU_POOL_TOKENS, kv_bytes_per_token, server_options
from specfleet.capture.engines.table import EngineOptions
from specfleet.capture.sglang_plugin import ENVIRONMENT
from specfleet.capture.sglang_plugin.settings import Settings
from specfleet.contracts.errors import (
    CaptureItemError,
    EngineError,
    HostError,
    StoreError,
    StoreFullError,
    UnreachableError,
)
from specfleet.contracts.ids import task_key
from specfleet.sglang import launch
from specfleet.sglang.client import SGLangClient
from specfleet.sglang.interpreter import find_python
from specfleet.sglang.launch import Server, ServerOptions, server_argv, server_env
from specfleet.wire.records_pb2 import CaptureContract, PromptTask, TaskAttempt

# SmolLM2-135M.
CONFIG = {
    "max_position_embeddings": 8192, "hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3,
    "num_hidden_layers": 30,
}  # fmt: skip
MODEL = Path("/models/t")
CONTRACT = CaptureContract(
    target=str(MODEL), layers=[1, 14, 26], final_state="post_norm", dtype="bfloat16", extras=["teacher_lse"]
)


def flag(argv: list[str], name: str) -> str:
    return argv[argv.index(name) + 1]


def test_a_server_on_a_cpu() -> None:
    options = server_options(
        EngineOptions("sglang", device="cpu", store_url="file:///p?capacity=1"), CONTRACT, MODEL, CONFIG
    )
    argv, env = server_argv("python", options, 1234), server_env(options)
    assert flag(argv, "--attention-backend") == "torch_native"
    assert env["SGLANG_USE_CPU_ENGINE"] == "1"
    # Every position of the model can be captured, although SGLang keeps seven for itself.
    assert flag(argv, "--context-length") == "8199"
    assert env["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] == "1"
    assert flag(argv, "--max-total-tokens") == str(CPU_POOL_TOKENS)
    settings = Settings.parse(env[ENVIRONMENT])
    assert settings == Settings("file:///p?capacity=1", (1, 14, 26), "post_norm", ("teacher_lse",), "bfloat16")


def test_a_server_on_gpus_never_replays_a_prefill_graph() -> None:
    engine = EngineOptions(
        "sglang", device="cuda:2", tensor_parallel=2, memory_fraction=0.6,
        sglang_flags="--attention-backend 'triton'",
    )  # fmt: skip
    argv = server_argv("python", server_options(engine, CONTRACT, MODEL, CONFIG), 1234)
    assert flag(argv, "--cuda-graph-backend-prefill") == "disabled"
    assert flag(argv, "--model-path") == str(MODEL)
    assert (flag(argv, "--device"), flag(argv, "--base-gpu-id"), flag(argv, "--tp-size")) == ("cuda", "2", "2")
    assert (flag(argv, "--dtype"), flag(argv, "--mem-fraction-static")) == ("bfloat16", "0.6")
    assert argv[-2:] == ["--attention-backend", "triton"]
    assert "--max-total-tokens" not in argv


def test_the_pool_of_a_cpu_stays_small() -> None:
    assert kv_bytes_per_token(CONFIG, "float32") == 2 * 30 * 3 * 64 * 4
    large = CONFIG | {
        "num_hidden_layers": 80,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 1 << 17,
    }
    options = server_options(EngineOptions("sglang", device="cpu"), CONTRACT, MODEL, large)
    assert options.pool_tokens * kv_bytes_per_token(large, options.dtype) <= 2 << 30


@pytest.mark.parametrize(
    ("ephemeral", "expected"),
    [
        ("32768\t60999\n", range(20_000, 32_768)),
        ("1024 20500", range(20_501, 55_536)),
        ("1024 65535", range(20_000, 55_536)),  # none are left: any
    ],
)
def test_ports_are_none_that_outgoing_connections_get(
    ephemeral: str, expected: range, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server loads its model for a while before it binds: one of those may be taken by then."""
    (tmp_path / "range").write_text(ephemeral)
    monkeypatch.setattr(launch, "_EPHEMERAL", tmp_path / "range")
    assert launch._ports() == expected
    assert launch._free_port() in expected


def test_an_interpreter_that_is_not_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HostError) as error:
        find_python(str(tmp_path / "python"))
    assert error.value.code == "SF-SGLANG-PYTHON"
    assert str(tmp_path / "python") in error.value.message


def script(path: Path, body: str) -> str:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


OPTIONS = ServerOptions(Path("/models/t"), "cpu", "float32")


async def test_a_server_that_ends_at_start_shows_its_log(tmp_path: Path) -> None:
    server = Server(
        script(tmp_path / "python", "echo 'specfleet: [SF-SGLANG-VERSION] no'; exit 3"), OPTIONS, tmp_path / "log"
    )
    with pytest.raises(HostError, match=r"(?s)ended with 3.*SF-SGLANG-VERSION") as error:
        await server.start()
    assert error.value.code == "SF-SGLANG-START"
    assert server.ended.is_set()


async def test_a_server_that_never_serves_is_ended_with_all_its_children(tmp_path: Path) -> None:
    server = Server(script(tmp_path / "python", "sleep 600 & wait"), OPTIONS, tmp_path / "log")
    with pytest.raises(HostError, match="was not ready after 1 s"):
        await server.start(ready_s=1.0)
    assert server.pid not in {group_of(process) for process in psutil.process_iter()}


def group_of(process: psutil.Process) -> int:
    """0 for a process that is gone, or only waits for its parent to notice."""
    try:
        return 0 if process.status() == psutil.STATUS_ZOMBIE else os.getpgid(process.pid)
    except (psutil.NoSuchProcess, ProcessLookupError):
        return 0


# -- answers -------------------------------------------------------------------------------------------------------

TASK = PromptTask(
    attempt=TaskAttempt(task=task_key("r", 0, 7), attempt=2), input_ids=[5, 6], loss_mask=b"\0\1", store="pool",
    features=["aux_states"],
)  # fmt: skip
STORED = {
    "ok": True, "num_tokens": 2, "layers": [1, 2], "plugin": "specfleet 0.1.0", "seconds": {"put": 0.1},
    "features": {"aux_states": {"key": "k", "dtype": "float32", "shape": [2, 8], "bytes": 64, "checksum": 2**64 - 1}},
}  # fmt: skip


class Answering:
    """A server whose next answer is `status` and `body`, once `gate` is open; it keeps the last request."""

    def __init__(self) -> None:
        self.status, self.body, self.request = 200, {}, {}
        self.gate = asyncio.Event()
        self.gate.set()

    async def generate(self, request: web.Request) -> web.Response:
        self.request = await request.json()
        await self.gate.wait()
        return web.json_response(self.body, status=self.status)


@pytest.fixture
async def answering() -> AsyncIterator[tuple[Answering, SGLangClient]]:
    answers, port = Answering(), free_port()
    app = web.Application()
    app.router.add_post("/generate", answers.generate)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    async with SGLangClient(f"http://127.0.0.1:{port}/") as client:
        yield answers, client
    await runner.cleanup()


async def test_a_request_asks_for_what_the_task_asks(answering: tuple[Answering, SGLangClient]) -> None:
    server, client = answering
    server.body = {"meta_info": {"specfleet_capture": [STORED]}}
    answer = await capture(client, TASK, 10)
    assert server.request["input_ids"] == [5, 6]
    assert server.request["sampling_params"]["max_new_tokens"] == 1
    wish = server.request["sampling_params"]["custom_params"]["specfleet_capture"]
    assert wish == {
        "sample": "r/e0000-p000000007/a2", "store": "pool", "features": ["aux_states"],
        "loss_mask": base64.b64encode(b"\0\1").decode(),
    }  # fmt: skip
    [spec] = answer.features
    assert (spec.name, list(spec.shape), spec.num_bytes, spec.checksum) == ("aux_states", [2, 8], 64, 2**64 - 1)


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (400, {"error": {"message": "too long"}}, CaptureItemError),
        (500, {}, EngineError),
        (200, {"meta_info": {}}, EngineError),
        (200, "SF-CAPTURE-NONFINITE sample", CaptureItemError),
        (200, "SF-STORE-FULL infra", StoreFullError),
        (200, "SF-STORE-TRANSFER infra", StoreError),
        # Another try of the same attempt would meet the same keys.
        (200, "SF-STORE-KEY-EXISTS infra", EngineError),
        (200, "SF-SGLANG-REQUEST infra", EngineError),
    ],
)
async def test_errors_by_whom_they_cost(
    answering: tuple[Answering, SGLangClient], status: int, body: Any, kind: type[Exception]
) -> None:
    server, client = answering
    if isinstance(body, str):
        code, who = body.split()
        body = {"meta_info": {"specfleet_capture": [{"ok": False, "code": code, "message": "m", "kind": who}]}}
    server.status, server.body = status, body
    with pytest.raises(kind) as error:
        await capture(client, TASK, 10)
    assert type(error.value) is kind


async def test_no_answer_in_time_and_no_server_are_told_apart(answering: tuple[Answering, SGLangClient]) -> None:
    server, client = answering
    server.gate.clear()
    with pytest.raises(UnreachableError) as late:
        await capture(client, TASK, 0.2)
    server.gate.set()
    async with SGLangClient(f"http://127.0.0.1:{free_port()}") as nobody:
        with pytest.raises(UnreachableError) as absent:
            await capture(nobody, TASK, 10)
        assert not await nobody.ready()
    assert (late.value.code, absent.value.code) == ("SF-SGLANG-TIMEOUT", "SF-SGLANG-UNREACHABLE")
