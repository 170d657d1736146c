"""specctl data regenerate."""

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specfleet.ctl.options import AsJson, SglangPython

if TYPE_CHECKING:
    from specfleet.data.regenerate.run import Regenerated
    from specfleet.sglang.launch import Server

_SAY_EVERY_S = 10.0
# On a CPU SGLang would take most of the memory for its cache.
_CPU_POOL_TOKENS = 16384
# \b: the lines of this paragraph stay as they are.
EXAMPLES = """\b
Examples:
  specctl data regenerate chats.jsonl --out answers.jsonl --target /models/Qwen3-8B
    starts SGLang with the target on this machine and keeps the token ids
  specctl data regenerate chats.jsonl --out answers.jsonl --target /models/Qwen3-8B --endpoint http://gpu1:30000
    uses a running SGLang server
  specctl data regenerate chats.jsonl --out answers.jsonl --endpoint https://api.example.org --model big
    uses any OpenAI-compatible endpoint; the answers are text where the server is not vLLM

The same command again goes on where the last one stopped. Then: specctl data prepare answers.jsonl --target DIR
"""


def regenerate(
    files: Annotated[
        list[str], typer.Argument(metavar="FILE", help="Conversations: JSON, JSON Lines or Parquet, also .gz.")
    ],
    out: Annotated[Path, typer.Option("--out", help="JSON Lines; appended to, and resumed from.")],
    endpoint: Annotated[
        str, typer.Option("--endpoint", metavar="URL", help="A running server: SGLang, vLLM or OpenAI-compatible.")
    ] = "",
    target: Annotated[
        str,
        typer.Option(
            "--target", metavar="TARGET", help="Directory or hub name. Alone: served here by SGLang; keeps token ids."
        ),
    ] = "",
    model: Annotated[
        str,
        typer.Option("--model", help="Name of the model, in requests and in every row; default: the only one served."),
    ] = "",
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, help="0: greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option("--top-p", min=0.0, max=1.0)] = 1.0,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Per answer; longer ones are cut.")] = 2048,
    thinking: Annotated[
        bool | None,
        typer.Option(
            "--thinking/--no-thinking", help="Reasoning mode (enable_thinking of the template).", show_default=False
        ),
    ] = None,
    template_kwargs: Annotated[
        str, typer.Option("--template-kwargs", metavar="JSON", help="Further variables of the chat template.")
    ] = "{}",
    concurrency: Annotated[int, typer.Option("--concurrency", min=1, help="Requests in flight.")] = 32,
    timeout_s: Annotated[float, typer.Option("--timeout", min=1.0, help="Seconds per request.")] = 600.0,
    max_samples: Annotated[int, typer.Option("--max-samples", min=0, help="Input rows; 0: all.")] = 0,
    where: Annotated[
        list[str] | None,
        typer.Option("--where", metavar="FIELD=A,B", help="Keep rows whose field has one of these values."),
    ] = None,
    sglang_python: SglangPython = "",
    api_key: Annotated[
        str, typer.Option("--api-key", envvar="SPECFLEET_API_KEY", help="Bearer token.", show_default=False)
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Let the target answer conversations anew, turn by turn: a draft learns best from its target's own words."""
    import asyncio

    from specfleet.ctl.commands.data import parse_filters
    from specfleet.ctl.output import emit
    from specfleet.ctl.views import facts_table
    from specfleet.data.regenerate.endpoint import Patience
    from specfleet.data.regenerate.engines import Sampling
    from specfleet.data.sources import resolve_sources
    from specfleet.target.hub import hub_name, pinned_target, target_dir
    from specfleet.telemetry import logs

    logs.configure("specctl")
    if not (endpoint or target):
        raise typer.BadParameter("who answers? Give --endpoint URL, --target DIR or both")
    kwargs = _json_object(template_kwargs) | ({} if thinking is None else {"enable_thinking": thinking})
    # Before a server is started or waited for.
    resolve_sources(files)
    if target and not model and hub_name(target):
        model = pinned_target(target)
    result = asyncio.run(
        _run(
            files,
            out,
            endpoint,
            target_dir(target, "none" if endpoint else "all") if target else None,
            sglang_python,
            model,
            api_key,
            Sampling(temperature, top_p, max_tokens, kwargs),
            Patience(request_s=timeout_s),
            {"concurrency": concurrency, "max_samples": max_samples, "keep": parse_filters(where or [])},
        )
    )
    emit(as_json, vars(result), lambda console: console.print(facts_table("regenerated", vars(result))))


async def _run(
    files: list[str],
    out: Path,
    endpoint_url: str,
    target: Path | None,
    sglang_python: str,
    model: str,
    api_key: str,
    sampling: Any,
    patience: Any,
    limits: dict[str, Any],
) -> "Regenerated":
    from contextlib import AsyncExitStack

    from specfleet.data.regenerate.endpoint import Endpoint
    from specfleet.data.regenerate.engines import OpenAIEngine, SglangEngine
    from specfleet.data.regenerate.run import regenerate

    async with AsyncExitStack() as stack:
        if target is not None and not endpoint_url:
            server = _server(target, sglang_python, out.with_name(f"{out.name}.sglang.log"))
            stack.push_async_callback(server.stop)
            await server.start()
            endpoint_url = server.url
        endpoint = await stack.enter_async_context(Endpoint(endpoint_url, patience, api_key))
        engine = (
            await SglangEngine.connect(endpoint, target, model, sampling)
            if target
            else await OpenAIEngine.connect(endpoint, model, sampling)
        )
        return await regenerate(files, engine, sampling, out, on_row=_progress(), **limits)


def _server(target: Path, sglang_python: str, log_path: Path) -> "Server":
    """SGLang with the target as it is stored; on a machine without GPU in float32."""
    from specfleet.sglang.interpreter import find_python
    from specfleet.sglang.launch import Server, ServerOptions
    from specfleet.target.facts import read_target_facts

    facts = read_target_facts(target)
    options = (
        ServerOptions(facts.path, "cuda", facts.dtype)
        if Path("/dev/nvidia0").exists()
        else ServerOptions(facts.path, "cpu", "float32", pool_tokens=_CPU_POOL_TOKENS)
    )
    return Server(find_python(sglang_python), options, log_path)


def _progress() -> Any:
    """A line on stderr every few seconds."""
    from specfleet.ctl.output import human_rate, say

    started = said = time.monotonic()

    def show(rows: int, tokens: int) -> None:
        nonlocal said
        now = time.monotonic()
        if now - said >= _SAY_EVERY_S:
            said = now
            say(f"{rows:,} rows, {human_rate(tokens / (now - started))}")

    return show


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise typer.BadParameter(f"--template-kwargs {text!r} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise typer.BadParameter(
            f"--template-kwargs {text!r} must be an object, as in '{{\"enable_thinking\": false}}'"
        )
    return value
