"""Several processes at once, each with a log file of its own."""

import asyncio
import contextlib
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path


async def run_all(
    commands: Mapping[str, Sequence[str]],
    jobs: int,
    logs: Path,
    env: Mapping[str, str],
    ended: Callable[[str, int], None],
) -> bool:
    """Runs every command, at most `jobs` at a time, in order; ended(name, exit code) after each.

    One that fails leaves the others alone. SIGINT and SIGTERM end those that run and start no more; False then.
    """
    slots, main = asyncio.Semaphore(jobs), asyncio.current_task()
    assert main is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, main.cancel)

    async def one(name: str, command: Sequence[str]) -> None:
        async with slots:
            with (logs / f"{name}.log").open("wb") as log:
                process = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log, env=dict(env))
            try:
                code = await process.wait()
            finally:
                if process.returncode is None:
                    with contextlib.suppress(ProcessLookupError):
                        process.terminate()
                    await process.wait()
        ended(name, code)

    try:
        async with asyncio.TaskGroup() as group:
            for name, command in commands.items():
                group.create_task(one(name, command))
    except asyncio.CancelledError:
        return False
    return True
