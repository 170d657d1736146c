"""Answers written anew: the same file whatever the endpoint does, nothing lost, nothing asked twice."""

import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from fixtures.chat_server import ChatServer, Trouble, answer_to
from structlog.testing import capture_logs

from specfleet.contracts.errors import ConfigError, DataError, HostError
from specfleet.data.prepare import prepare_prompt_set
from specfleet.data.regenerate.endpoint import Endpoint, Patience
from specfleet.data.regenerate.engines import Answer, OpenAIEngine, Sampling, SglangEngine
from specfleet.data.regenerate.output import OutputFile
from specfleet.data.regenerate.run import Regenerated, regenerate
from specfleet.data.render import ChatRenderer

HASTY = Patience(attempts=4, first_wait_s=0.001, longest_wait_s=0.01, request_s=5.0)


def write_chats(path: Path, count: int = 12) -> Path:
    """Every third one has two turns."""
    rows = []
    for index in range(count):
        messages = [{"role": "user", "content": f"question {index}"}, {"role": "assistant", "content": "old"}]
        if index % 3 == 2:
            messages += [{"role": "user", "content": f"and {index}?"}, {"role": "assistant", "content": "old too"}]
        rows.append({"id": f"c{index}", "source": "s", "license": "CC-BY-4.0", "split": "train", "messages": messages})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


async def run(server: ChatServer, source: Path, out: Path, **options: Any) -> Regenerated:
    sampling = options.pop("sampling", Sampling())
    async with Endpoint(server.url, HASTY) as endpoint:
        engine = await OpenAIEngine.connect(endpoint, "", sampling)
        return await regenerate([source], engine, sampling, out, **options)


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
async def undisturbed(tmp_path: Path) -> bytes:
    """What a well-behaved endpoint makes of write_chats."""
    async with ChatServer() as server:
        await run(server, write_chats(tmp_path / "chats.jsonl"), tmp_path / "undisturbed.jsonl")
    return (tmp_path / "undisturbed.jsonl").read_bytes()


async def test_each_answer_is_given_on_the_new_history(tmp_path: Path) -> None:
    async with ChatServer() as server:
        result = await run(server, write_chats(tmp_path / "chats.jsonl", 3), tmp_path / "out.jsonl")
    last = rows_of(tmp_path / "out.jsonl")[2]
    first = answer_to(last["messages"][:1])
    assert [m["content"] for m in last["messages"]] == ["question 2", first, "and 2?", answer_to(last["messages"][:3])]
    assert (last["id"], last["source"], last["license"], last["split"]) == ("c2", "s", "CC-BY-4.0", "train")
    assert last["regenerated"]["model"] == "tester"
    assert result.finish == {"stop": 3}
    assert (result.rows_read, result.rows, result.rejects, result.new_tokens) == (3, 3, {}, 8)


async def test_token_ids_are_asked_of_those_who_give_them(tmp_path: Path) -> None:
    chats = write_chats(tmp_path / "chats.jsonl", 3)
    async with ChatServer(owner="vllm") as server:
        result = await run(server, chats, tmp_path / "out.jsonl")
    assert result.rows_with_token_ids == 3
    single, _, double = rows_of(tmp_path / "out.jsonl")
    assert (single["prompt_token_ids"], single["response_token_ids"]) == ([1], [40, 41, 2])
    assert "response_loss_mask" not in single
    assert double["response_token_ids"] == [40, 41, 2, 50, 40, 41, 2]
    assert double["response_loss_mask"] == [1, 1, 1, 0, 1, 1, 1]


async def test_template_variables_and_sampling_reach_the_endpoint(tmp_path: Path) -> None:
    sampling = Sampling(0.7, 0.9, 33, {"enable_thinking": False})
    async with ChatServer() as server:
        await run(server, write_chats(tmp_path / "chats.jsonl", 1), tmp_path / "out.jsonl", sampling=sampling)
    (body,) = server.bodies
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    assert (body["model"], body["temperature"], body["top_p"], body["max_tokens"]) == ("tester", 0.7, 0.9, 33)
    (row,) = rows_of(tmp_path / "out.jsonl")
    assert row["regenerated"]["template_kwargs"] == {"enable_thinking": False}


def trouble_by_turns() -> Trouble:
    """429, then a cut connection, then a proxy's page, then the answer."""

    async def trouble(text: str, attempt: int, request: web.Request) -> web.Response | None:
        match attempt:
            case 1:
                return web.Response(status=429, headers={"Retry-After": "0"}, text="slow down")
            case 2:
                assert request.transport is not None
                request.transport.abort()
                return web.Response()
            case 3:
                return web.Response(status=200, text="<html>starting</html>")
        return None

    return trouble


async def test_a_misbehaving_endpoint_gives_the_same_file(tmp_path: Path, undisturbed: bytes) -> None:
    async with ChatServer(trouble_by_turns()) as server:
        result = await run(server, tmp_path / "chats.jsonl", tmp_path / "out.jsonl", concurrency=4)
    assert (tmp_path / "out.jsonl").read_bytes() == undisturbed
    assert result.rejects == {}
    assert len(server.bodies) == 4 * 16
    assert server.most_in_flight == 4


async def test_rows_keep_their_order_behind_a_slow_one(tmp_path: Path, undisturbed: bytes) -> None:
    others = asyncio.Semaphore(0)

    async def slow_first(text: str, attempt: int, request: web.Request) -> web.Response | None:
        if '"question 0"' not in text:
            others.release()
            return None
        for _ in range(11):
            await others.acquire()
        assert not (tmp_path / "out.jsonl").read_bytes(), "nothing may be written before the first row"
        return None

    async with ChatServer(slow_first) as server:
        await run(server, tmp_path / "chats.jsonl", tmp_path / "out.jsonl", concurrency=16)
    assert (tmp_path / "out.jsonl").read_bytes() == undisturbed


async def test_killed_and_resumed(tmp_path: Path, undisturbed: bytes) -> None:
    out, stuck = tmp_path / "out.jsonl", asyncio.Event()

    async def stall(text: str, attempt: int, request: web.Request) -> web.Response | None:
        if '"question 7"' in text and attempt == 1:
            stuck.set()
            await asyncio.Event().wait()
        return None

    async with ChatServer(stall) as server:
        command = [
            sys.executable, "-m", "specfleet.ctl", "data", "regenerate", str(tmp_path / "chats.jsonl"), "--out", str(out),
            "--endpoint", server.url, "--concurrency", "1", "--json",
        ]  # fmt: skip
        killed = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL)
        async with asyncio.timeout(30):
            await stuck.wait()
        killed.send_signal(signal.SIGKILL)
        await killed.wait()
        kept = out.read_bytes()
        # The death of a machine may leave half a row.
        assert undisturbed.startswith(kept)
        assert 0 < kept.count(b"\n") < 12
        out.write_bytes(undisturbed[: len(kept) + 20])
        asked = len(server.bodies)
        resumed = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        async with asyncio.timeout(30):
            printed, _ = await resumed.communicate()
    assert resumed.returncode == 0
    assert out.read_bytes() == undisturbed
    summary = json.loads(printed)
    assert summary["rows"] == 12
    assert summary["new_rows"] == 12 - kept.count(b"\n")
    assert len(server.bodies) - asked == sum(1 + (i % 3 == 2) for i in range(12 - summary["new_rows"], 12))


async def test_what_cannot_be_answered_is_counted(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": "only a prompt"}]},
        {"messages": [{"role": "user", "content": "only a prompt"}, {"role": "assistant", "content": "known"}]},
        {"messages": [{"role": "user", "content": "too long"}]},
        {"messages": [{"role": "user", "content": "poison"}]},
        {"messages": [{"role": "system", "content": "be kind"}]},
        {"messages": [{"role": "user", "content": "x"}], "tools": [{"name": "f"}]},
        {"text": "no conversation"},
    ]
    source = tmp_path / "mixed.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    answered = asyncio.Event()

    async def refuse(text: str, attempt: int, request: web.Request) -> web.Response | None:
        if "too long" in text:
            return web.Response(status=400, text="9000 tokens, the context has 4096")
        if "poison" in text:
            await answered.wait()
            return web.Response(status=500)
        answered.set()
        return None

    async with ChatServer(refuse) as server:
        result = await run(server, source, tmp_path / "out.jsonl")
        assert (result.rows_read, result.rows) == (7, 1)
        assert result.rejects == {
            "duplicate": 1, "endpoint_refused": 1, "endpoint_failed": 1, "no_question": 1, "tools_unsupported": 1,
            "unknown_format": 1,
        }  # fmt: skip
        assert "9000 tokens" in result.reject_examples["endpoint_refused"]
        source.write_text(json.dumps(rows[2]) + "\n")
        with pytest.raises(DataError) as error:
            await run(server, source, tmp_path / "none.jsonl")
    assert error.value.code == "SF-REGEN-NO-ROWS"


async def test_an_endpoint_that_is_gone_ends_the_run_and_keeps_the_rows(tmp_path: Path, undisturbed: bytes) -> None:
    gone = False

    async def dies(text: str, attempt: int, request: web.Request) -> web.Response | None:
        nonlocal gone
        gone = gone or '"question 6"' in text
        return web.Response(status=503) if gone else None

    async with ChatServer(dies) as server:
        with capture_logs() as logs, pytest.raises(HostError) as error:
            await run(server, tmp_path / "chats.jsonl", tmp_path / "out.jsonl", concurrency=1)
    # Whoever waits is told, once for all attempts of a moment.
    assert [line["event"] for line in logs] == ["endpoint does not answer; trying again"]
    assert error.value.code == "SF-REGEN-ENDPOINT"
    kept = (tmp_path / "out.jsonl").read_bytes()
    assert kept.count(b"\n") == 6
    assert undisturbed.startswith(kept)
    with pytest.raises(HostError) as error:
        await run(server, tmp_path / "chats.jsonl", tmp_path / "out.jsonl")
    assert server.url in error.value.message


async def test_a_missing_key_is_told_at_once(tmp_path: Path) -> None:
    async def locked(text: str, attempt: int, request: web.Request) -> web.Response | None:
        return (
            None if request.headers.get("Authorization") == "Bearer secret" else web.Response(status=401, text="who?")
        )

    chats = write_chats(tmp_path / "chats.jsonl", 1)
    async with ChatServer(locked) as server:
        with pytest.raises(HostError) as error:
            await run(server, chats, tmp_path / "out.jsonl")
        assert "401: who?. Give --api-key" in error.value.message
        assert len(server.bodies) == 1
        async with Endpoint(server.url, HASTY, api_key="secret") as endpoint:
            engine = await OpenAIEngine.connect(endpoint, "tester", Sampling())
            assert (await regenerate([chats], engine, Sampling(), tmp_path / "out.jsonl")).rows == 1
            with pytest.raises(ConfigError) as other:
                await SglangEngine.connect(endpoint, tmp_path, "", Sampling())
    assert other.value.code == "SF-REGEN-ENGINE"


async def test_outputs_are_not_mixed(tmp_path: Path, undisturbed: bytes) -> None:
    chats, out = tmp_path / "chats.jsonl", tmp_path / "undisturbed.jsonl"
    async with ChatServer() as server:
        with pytest.raises(ConfigError) as other:
            await run(server, chats, out, sampling=Sampling(temperature=0.5))
        assert other.value.code == "SF-REGEN-SETTINGS"
        assert "temperature: 0.0 there, 0.5 now" in other.value.message
        with pytest.raises(DataError) as foreign:
            await run(server, chats, chats)
        assert foreign.value.code == "SF-REGEN-OUT"
        with OutputFile(out, {}), pytest.raises(HostError) as busy:
            await run(server, chats, out)
        assert busy.value.code == "SF-REGEN-BUSY"
    assert out.read_bytes() == undisturbed
    for url, code in (("localhost:30000", "SF-REGEN-ENDPOINT"), ("ftp://x", "SF-REGEN-ENDPOINT")):
        with pytest.raises(ConfigError) as bad:
            Endpoint(url)
        assert bad.value.code == code


def test_waits_double_up_to_the_longest() -> None:
    patience = Patience(first_wait_s=1.0, longest_wait_s=10.0)
    assert [patience.wait_s(n, 1.0) for n in (1, 2, 3, 4, 5)] == [1.0, 2.0, 4.0, 8.0, 10.0]
    assert patience.wait_s(3, 0.0) == 2.0


class IdEngine:
    """Answers with token ids that its text does not tokenise to, as models do now and then."""

    model = "ids"

    def __init__(self, renderer: ChatRenderer, forgets: bool = False) -> None:
        self._renderer, self._forgets = renderer, forgets
        self.answers: list[list[int]] = []

    async def answer(self, messages: list[dict[str, Any]]) -> Answer:
        # Single bytes, where the tokenizer would merge.
        ids = [*self._renderer.tokenizer.convert_tokens_to_ids(list("answer")), 2]
        prompt = self._renderer.prompt_ids(messages) if self._forgets or not self.answers else self._continued(messages)
        self.prompt = prompt
        self.answers.append(ids)
        return Answer("answer", "stop", prompt_ids=prompt, ids=ids, tokens=len(ids))

    def _continued(self, messages: list[dict[str, Any]]) -> list[int]:
        """The history as it was generated, then the new question."""
        text = self._renderer.prompt_text(messages)
        new = text[text.rindex("answer<|im_end|>") + len("answer<|im_end|>") :]
        return self.prompt + self.answers[-1] + self._renderer.tokenizer.encode(new, add_special_tokens=False)


@pytest.mark.parametrize("forgets", [False, True])
async def test_token_ids_reach_the_prompt_set(tmp_path: Path, tiny_target: Path, forgets: bool) -> None:
    chat = [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "x"}, {"role": "user", "content": "b?"}]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
    engine = IdEngine(ChatRenderer.load(tiny_target, 384, [2]), forgets)
    result = await regenerate([tmp_path / "chat.jsonl"], engine, Sampling(), tmp_path / "out.jsonl")
    prompt_set = prepare_prompt_set([tmp_path / "out.jsonl"], tiny_target, tmp_path / "sets")
    (prompt,) = next(iter(prompt_set.iter_batches(1)))
    ids, mask = list(prompt.input_ids), list(prompt.loss_mask)
    if forgets:
        # The second prompt does not continue the first answer's ids: only the text is kept, and tokenised again.
        assert result.rows_with_token_ids == 0
        assert ids[: len(engine.prompt)] == engine.prompt
        return
    assert result.rows_with_token_ids == 1
    assert ids == engine.prompt + engine.answers[1]
    assert [i for i, trained in zip(ids, mask, strict=True) if trained] == engine.answers[0] + engine.answers[1]
    assert prompt.prompt_tokens == mask.index(1)


@pytest.mark.parametrize("mask", [[1, 1], [1, 0, 1, 0], [0, 1, 1, 1], [1, 2, 1, 1]])
async def test_a_mask_that_does_not_fit_is_rejected(tmp_path: Path, tiny_target: Path, mask: list[int]) -> None:
    row = {"prompt_token_ids": [1, 9, 10], "response_token_ids": [20, 21, 22, 2], "response_loss_mask": mask}
    (tmp_path / "row.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError) as error:
        prepare_prompt_set([tmp_path / "row.jsonl"], tiny_target, tmp_path / "sets")
    assert "bad_token_ids 1" in error.value.message
