"""A launch as the agent sees it: one elastic launcher process and the ranks below it."""

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

import psutil
import structlog
from google.protobuf.json_format import MessageToJson, Parse, ParseError

from specfleet.trainer.elastic import LOG_LINES, tail
from specfleet.wire.trainer_pb2 import Launch, LaunchStatus

log = structlog.get_logger()

_SIGNAL_POLL_S = 0.2


class RunningLaunch:
    """Starts on `start`, ends by itself or by `stop`; `status` is what the coordinator is told."""

    def __init__(self, launch: Launch, rank_arguments: list[str]) -> None:
        self.launch = launch
        self.directory = Path(launch.output_dir).resolve() / launch.run_id
        self._rank_arguments = rank_arguments
        self._log_path = self.directory / "logs" / f"launcher-node{launch.node_rank}.log"
        self._process: asyncio.subprocess.Process | None = None
        self._failure = ""

    @property
    def exited(self) -> bool:
        return bool(self._failure) or (self._process is not None and self._process.returncode is not None)

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    async def start(self) -> None:
        """Never raises: a launch that cannot start has EXITED, with the reason."""
        try:
            self._log_path.parent.mkdir(parents=True, exist_ok=True)
            record = self._log_path.parent / f"launch-node{self.launch.node_rank}.json"
            if record.exists() and Parse(record.read_text(), Launch()).launch_id == self.launch.launch_id:
                # Its ranks left with the agent that started them. A second set under the same id would be handed the
                # old generation, and train again what that had trained.
                self._failure = "the agent was restarted while this launch ran"
                log.warning("launch is over", run=self.launch.run_id, reason=self._failure)
                return
            record.write_text(MessageToJson(self.launch))
            (self.directory / "run.yaml").write_text(self.launch.config_yaml)
            with self._log_path.open("wb") as output:
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    "specfleet.trainer.elastic",
                    "--launch",
                    str(record),
                    "--agent-pid",
                    str(os.getpid()),
                    *self._rank_arguments,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                )
        except (OSError, ParseError) as error:
            self._failure = f"cannot start in {self.directory}: {error}"
            log.error("launch failed", run=self.launch.run_id, reason=self._failure)
            return
        log.info(
            "launched", run=self.launch.run_id, launch=self.launch.launch_id, world=self.launch.world, pid=self.pid
        )

    async def wait(self) -> None:
        if self._process is not None:
            code = await self._process.wait()
            log.info("launch ended", run=self.launch.run_id, launch=self.launch.launch_id, exit_code=code)

    async def stop(self, grace_s: float) -> None:
        """SIGTERM to every rank: they finish the step, write a checkpoint and leave. SIGKILL when the grace is over.

        The ranks get the signal directly: sent to the elastic launcher it would count as a failure of the launch.
        """
        if self._process is None or self.exited:
            return
        try:
            async with asyncio.timeout(grace_s):
                await self._terminate_ranks(self._process)
        except TimeoutError:
            log.warning("ranks did not leave in time; killing them", run=self.launch.run_id, grace_s=grace_s)
            for rank in _children(self.pid):
                _send(rank, signal.SIGKILL)
            _send(self._process, signal.SIGKILL)
            await self._process.wait()

    async def _terminate_ranks(self, launcher: asyncio.subprocess.Process) -> None:
        told: set[int] = set()
        ended = asyncio.ensure_future(launcher.wait())
        try:
            while not ended.done():
                ranks = _children(self.pid)
                for rank in ranks:
                    if rank.pid not in told:
                        told.add(rank.pid)
                        _send(rank, signal.SIGTERM)
                if not ranks and not told:
                    # Still importing torch: there is nobody to ask, and nothing to save.
                    _send(launcher, signal.SIGTERM)
                await asyncio.wait({ended}, timeout=_SIGNAL_POLL_S)
        finally:
            ended.cancel()

    def status(self) -> LaunchStatus:
        status = LaunchStatus(run_id=self.launch.run_id, launch_id=self.launch.launch_id, state="RUNNING")
        if self.exited:
            code = self._process.returncode if self._process is not None else 1
            assert code is not None
            status.state = "EXITED"
            status.exit_code = code if code >= 0 else 128 - code
            status.message = self._failure or ("" if code == 0 else tail(self._log_path, LOG_LINES + 1))
        return status


def _children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children()
    except psutil.NoSuchProcess:
        return []


def _send(process: "psutil.Process | asyncio.subprocess.Process", wanted: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
        process.send_signal(wanted)
