"""The HTTP side of one SGLang server: is it up, what does it serve, and any number of requests at a time."""

from dataclasses import dataclass
from typing import Any, Self

import aiohttp

from specfleet.contracts.errors import EngineError, RequestRefusedError, UnreachableError

# Answers without any work behind them.
QUICK_S = 5.0
# The server generates one token before it answers, and gives up by itself after 20 s.
PROBE_S = 30.0
# The server closes connections idle for 5 s; one reused at that moment would look like a server that died.
KEEP_ALIVE_S = 2.0


@dataclass(frozen=True)
class ServerFacts:
    """What a server says about itself."""

    model_path: str
    tokenizer_path: str
    version: str
    dtype: str
    tensor_parallel: int
    max_input_tokens: int
    """Longest prompt it accepts."""
    pool_tokens: int
    """Tokens its key-value pool holds: more in flight only queue."""


class SGLangClient:
    """Every method raises UnreachableError SF-SGLANG-UNREACHABLE when the connection fails or ends before the answer,
    SF-SGLANG-TIMEOUT when the answer takes too long, RequestRefusedError SF-SGLANG-REFUSED on HTTP 400 and EngineError
    SF-SGLANG-HTTP on any other status that is not 200."""

    def __init__(self, url: str) -> None:
        """url: http://HOST:PORT. Must be made inside the event loop that uses it."""
        self.url = url.rstrip("/")
        # No limit on connections: whoever sends requests bounds them, and a hidden queue here would spoil that.
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._session.close()

    async def ready(self) -> bool:
        """Whether the server accepts requests now."""
        try:
            await self._call("GET", "/health", None, QUICK_S)
        except (EngineError, UnreachableError):
            return False
        return True

    async def computes(self) -> bool:
        """Whether the model still makes progress: a server whose scheduler hangs accepts requests and never answers."""
        try:
            await self._call("GET", "/health_generate", None, PROBE_S)
        except (EngineError, UnreachableError):
            return False
        return True

    async def model_path(self) -> str:
        """Answered without asking the scheduler."""
        return str((await self._call("GET", "/model_info", None, QUICK_S))["model_path"])

    async def facts(self) -> ServerFacts:
        info = await self._call("GET", "/server_info", None, PROBE_S)
        return ServerFacts(
            model_path=str(info["model_path"]),
            tokenizer_path=str(info["tokenizer_path"]),
            version=str(info["version"]),
            dtype=str(info["dtype"]),
            tensor_parallel=int(info["tp_size"]),
            # The scheduler refuses a prompt of exactly this length.
            max_input_tokens=int(info["max_req_input_len"]) - 1,
            pool_tokens=int(info["max_total_num_tokens"]),
        )

    async def generate(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """POST /generate for one prompt; `request` is SGLang's own form. Cancelling it aborts the request there."""
        answer: dict[str, Any] = await self.post("/generate", request, timeout_s)
        return answer

    async def post(self, path: str, body: dict[str, Any], timeout_s: float) -> Any:
        return await self._call("POST", path, body, timeout_s)

    async def _call(self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float) -> Any:
        """The answer's JSON; None when it has no body."""
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=QUICK_S)
        try:
            async with self._session.request(method, self.url + path, json=body, timeout=timeout) as response:
                if response.status == 200:
                    return await response.json(content_type=None)
                text = (await response.text())[:500]
        except (aiohttp.ClientError, ConnectionError) as error:  # not connecting in time is one of them
            raise UnreachableError(
                "SF-SGLANG-UNREACHABLE", f"{self.url}{path} gave no answer: {type(error).__name__}: {error}"
            ) from error
        except TimeoutError as error:
            raise UnreachableError(
                "SF-SGLANG-TIMEOUT", f"{self.url}{path} did not answer within {timeout_s:.0f} s"
            ) from error
        if response.status == 400:
            raise RequestRefusedError("SF-SGLANG-REFUSED", f"{self.url}{path} refused the request: {text}")
        raise EngineError("SF-SGLANG-HTTP", f"{self.url}{path} answered {response.status}: {text}")
