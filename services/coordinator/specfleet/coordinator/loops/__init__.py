"""The loops that keep work moving. Each pass reads the ledger, decides, commits, and only then announces."""

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from specfleet.contracts.errors import SpecfleetError
from specfleet.coordinator import metrics
from specfleet.coordinator.hub import Wake

log = structlog.get_logger()

_MAX_PAUSE_S = 5.0


async def forever(name: str, wake: Wake, tick_s: float, one_pass: Callable[[], Awaitable[None]]) -> None:
    """Runs one_pass whenever woken, and every tick_s. A pass that fails is logged and repeated after a growing pause."""
    failures = 0
    while True:
        await wake.wait(tick_s)
        try:
            await one_pass()
            failures = 0
        except SpecfleetError as error:
            failures += 1
            log.error("loop failed", loop=name, code=error.code, error=error.message)
        except Exception:
            failures += 1
            log.exception("loop failed", loop=name)
        if failures:
            metrics.LOOP_ERRORS.labels(name).inc()
            await asyncio.sleep(min(_MAX_PAUSE_S, 0.1 * 2**failures))
            wake.set()
