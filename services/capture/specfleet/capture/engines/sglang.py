"""SGLang with the capture plugin: a server of this worker's own, or servers that run already.

A server is trusted only after it has shown what it does: the target it names is hashed here, and a canary prompt must come
back from the store with the rows, layers, widths and dtype of the contract. A server that is lost, hangs or answers for another
target ends the engine; the worker loads it anew and attests again.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Self

import structlog

from specfleet.capture import metrics
from specfleet.capture.engines.base import ServingEngine
from specfleet.capture.engines.probing import Probed, probe
from specfleet.capture.engines.requests import capture
from specfleet.capture.engines.serving import start_server
from specfleet.capture.engines.table import EngineOptions
from specfleet.contracts.capture import contract_mismatches
from specfleet.contracts.errors import CaptureItemError, EngineError, UnreachableError
from specfleet.sglang.client import SGLangClient
from specfleet.sglang.launch import Server
from specfleet.store.base import FeatureStore
from specfleet.wire.records_pb2 import CaptureContract, FeatureSpec, PromptTask

log = structlog.get_logger()

# Far above a prompt's time in a full window, and above the time the plugin waits for room in the pool.
REQUEST_S = 180.0
# Between looks at servers that are not this worker's own.
WATCH_S = 5.0
# Unanswered looks in a row before a server counts as gone: a busy one may miss one. Broken requests tell sooner.
MISSES = 3


class Link:
    """One server, what it proved to be, and what it works on."""

    def __init__(self, client: SGLangClient, probed: Probed) -> None:
        self.client, self.probed = client, probed
        self.tokens = self.misses = 0


class SGLangEngine(ServingEngine):
    def __init__(
        self, links: Sequence[Link], away: Sequence[str], asked: CaptureContract, server: Server | None
    ) -> None:
        """away: servers that did not answer. server: the one that belongs to this engine."""
        self._links, self._away, self._server = list(links), list(away), server
        self.lost = asyncio.Event()
        self.most_tokens = sum(link.probed.server.pool_tokens for link in links)
        self.version = ", ".join(sorted({link.probed.version for link in links}))
        self.plugin_version = ", ".join(sorted({link.probed.plugin for link in links}))
        # One wrong server is enough to refuse them all: prompts go to any of them.
        wrong = [link for link in links if contract_mismatches(asked, link.probed.measured)]
        self._facts = (wrong or self._links)[0].probed.measured
        self._watcher = asyncio.create_task(self._watch())

    @classmethod
    async def load(cls, options: EngineOptions, contract: CaptureContract, store: FeatureStore) -> Self:
        """Starts or reaches the servers and probes each.

        Raises HostError (no SGLang, a server that does not start), UnreachableError (no server answers), ContractError
        SF-SGLANG-CANARY, or what the store or the target's files raise.
        """
        server = None if options.servers else await start_server(options, contract)
        async with contextlib.AsyncExitStack() as opened:
            if server is not None:
                opened.push_async_callback(server.stop)
            links, away, why = [], [], []
            for url in (server.url,) if server else options.servers:
                client = await opened.enter_async_context(SGLangClient(url))
                try:
                    links.append(Link(client, await probe(client, contract, store)))
                except UnreachableError as error:
                    await client.close()
                    log.warning("server does not answer", url=url, error=str(error))
                    away.append(url)
                    why.append(str(error))
            if not links:
                raise UnreachableError("SF-SGLANG-UNREACHABLE", "; ".join(why))
            engine = cls(links, away, contract, server)
            opened.pop_all()
        return engine

    def attest(self) -> CaptureContract:
        return self._facts

    async def capture(self, task: PromptTask) -> list[FeatureSpec]:
        link, tokens = min(self._links, key=lambda link: link.tokens), len(task.input_ids)
        longest = link.probed.server.max_input_tokens
        if tokens > longest:
            raise CaptureItemError(
                "SF-CAPTURE-TOO-LONG", f"the prompt has {tokens} tokens; {link.client.url} takes at most {longest}"
            )
        link.tokens += tokens
        try:
            answer = await capture(link.client, task, REQUEST_S)
        except UnreachableError as error:
            # A slow server may still be a good one; any other broken connection is a server that went away.
            if error.code != "SF-SGLANG-TIMEOUT" or not await link.client.computes():
                self._lose(error.message)
            raise
        except EngineError as error:
            if error.code == "SF-SGLANG-NO-CAPTURE":
                self._lose(error.message)
            raise
        finally:
            link.tokens -= tokens
        if list(answer.layers) != list(link.probed.measured.layers):
            self._lose(f"{link.client.url} captures layers {list(answer.layers)} now")
            raise EngineError("SF-SGLANG-CHANGED", f"{link.client.url} is not the server that was probed")
        return list(answer.features)

    async def close(self) -> None:
        self._watcher.cancel()
        await asyncio.gather(self._watcher, return_exceptions=True)
        for link in self._links:
            await link.client.close()
        if self._server is not None:
            await self._server.stop()

    def _lose(self, reason: str) -> None:
        if not self.lost.is_set():
            log.error("engine lost", reason=reason)
            metrics.ENGINE_LOSSES.inc()
            self.lost.set()

    async def _watch(self) -> None:
        if self._server is not None:
            await self._server.ended.wait()
            self._lose(f"the server ended; see {self._server.log_path}")
            return
        while not self.lost.is_set():
            await asyncio.sleep(WATCH_S)
            for link in self._links:
                await self._look_at(link)
            for url in self._away:
                async with SGLangClient(url) as client:
                    if await client.ready():
                        self._lose(f"{url} answers again")

    async def _look_at(self, link: Link) -> None:
        """Whether the server still answers, and for the same target: another one may have taken its place."""
        expected = link.probed.server.model_path
        try:
            found = await link.client.model_path()
        except (UnreachableError, EngineError) as error:
            link.misses += 1
            if link.misses == MISSES:
                self._lose(error.message)
        else:
            link.misses = 0
            if found != expected:
                self._lose(f"{link.client.url} serves {found} now, not {expected}")
