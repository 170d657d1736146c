"""JSON over HTTP to one engine, with patience for an engine that is busy, restarting or briefly away."""

import asyncio
import json
import random
import time
from dataclasses import dataclass
from typing import Any, Self

import aiohttp
import structlog

from specfleet.contracts.errors import ConfigError, HostError
from specfleet.data.conversation import RowRejected

log = structlog.get_logger()

# Many requests fail together when an engine goes away: one line tells of all.
_SAY_EVERY_S = 10.0
# What passes by itself: timeouts, too many requests, and whatever a proxy says while its engine restarts.
_PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})


@dataclass(frozen=True)
class Patience:
    """attempts per request; waits double from first_wait_s to longest_wait_s, with jitter."""

    attempts: int = 8
    first_wait_s: float = 1.0
    longest_wait_s: float = 60.0
    request_s: float = 600.0

    def wait_s(self, failures: int, draw: float) -> float:
        """Seconds to wait after so many failures (from 1). draw: uniform in [0, 1), so that clients spread out."""
        return min(self.longest_wait_s, self.first_wait_s * 2.0 ** (failures - 1)) * (0.5 + draw / 2)


class _Refused(Exception):
    """A status that no waiting changes."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{status}: {text[:300]}")
        self.status = status


class Endpoint:
    """Use as an async context manager. api_key: sent as a bearer token when not empty."""

    def __init__(self, url: str, patience: Patience | None = None, api_key: str = "") -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError("SF-REGEN-ENDPOINT", f"endpoint {url!r} is not a URL; an example: http://127.0.0.1:30000")
        self._patience = patience or Patience()
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._successes = 0
        self._said_s = -_SAY_EVERY_S

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=self._patience.request_s),
            # Our callers bound what is in flight.
            connector=aiohttp.TCPConnector(limit=0),
            headers=self._headers,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def get(self, path: str) -> dict[str, Any] | None:
        """The document at a path; None when there is no such path. Raises HostError SF-REGEN-ENDPOINT."""
        try:
            return await self._ask("GET", path, None)
        except _Refused as refused:
            if refused.status in (404, 405):
                return None
            raise HostError("SF-REGEN-ENDPOINT", f"{self.url}{path} answers {refused}") from refused

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Raises HostError SF-REGEN-ENDPOINT when the engine is at fault; when this request is, RowRejected: endpoint_refused,
        or endpoint_failed where only its failures show it."""
        try:
            return await self._ask("POST", path, body)
        except _Refused as refused:
            if refused.status in (401, 403):
                raise HostError("SF-REGEN-ENDPOINT", f"{self.url}{path} answers {refused}. Give --api-key") from refused
            raise RowRejected("endpoint_refused", str(refused)) from refused

    async def _ask(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        before = self._successes
        for failures in range(1, self._patience.attempts + 1):
            asked_s = 0.0
            try:
                async with self._session.request(method, self.url + path, json=body) as response:
                    text = await response.text()
                if response.status == 200:
                    self._successes += 1
                    return _document(text)
                if response.status not in _PASSING:
                    raise _Refused(response.status, text)
                failure = f"{response.status}: {text[:300]}"
                asked_s = _seconds(response.headers.get("Retry-After", ""))
            except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                failure = f"{type(error).__name__}: {error}"
            if failures < self._patience.attempts:
                wait_s = self._patience.wait_s(failures, random.random())
                self._say(path, failure)
                await asyncio.sleep(max(wait_s, min(asked_s, self._patience.longest_wait_s)))
        failure = f"{failure} ({self._patience.attempts} attempts)"
        if self._successes > before:
            # Others were answered meanwhile, so it is this request that the engine cannot take.
            raise RowRejected("endpoint_failed", failure)
        raise HostError(
            "SF-REGEN-ENDPOINT", f"{self.url}{path} does not answer: {failure}. What is written stays; run it again"
        )

    def _say(self, path: str, failure: str) -> None:
        now = time.monotonic()
        if now - self._said_s >= _SAY_EVERY_S:
            self._said_s = now
            log.warning("endpoint does not answer; trying again", url=self.url + path, error=failure)


def _document(text: str) -> dict[str, Any]:
    """Raises ValueError for anything but an object: a proxy's page is as passing as its status 502."""
    document = json.loads(text)
    if not isinstance(document, dict):
        raise ValueError(f"a JSON {type(document).__name__} instead of an object")
    return document


def _seconds(header: str) -> float:
    """Retry-After in seconds; its other form, a date, is not honoured."""
    return float(header) if header.isdecimal() else 0.0
