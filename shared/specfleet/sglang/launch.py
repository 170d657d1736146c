"""One SGLang server process on loopback: its command line, its start, its readiness, its end."""

import asyncio
import contextlib
import os
import random
import signal
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from specfleet.contracts.errors import HostError
from specfleet.sglang.client import SGLangClient
from specfleet.telemetry.process import dies_with

log = structlog.get_logger()

# Loading large weights and compiling kernels take minutes; a server that hangs at start must still be noticed.
READY_S = 900.0
POLL_S = 0.1
LOG_TAIL_BYTES = 4_000
LOOPBACK = "127.0.0.1"
# 0.5.14 refuses to start when its unused gRPC port, ten thousand above the other one, exceeds 65535.
_LOWEST_PORT, _HIGHEST_PORT = 20_000, 55_535
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


@dataclass(frozen=True)
class ServerOptions:
    """What a server is started with. Everything unset is SGLang's own choice."""

    model: Path
    device: str
    """cpu or cuda."""
    dtype: str
    """dtype of the arithmetic, as torch names it."""
    context_length: int = 0
    """Prompt and answer together; may exceed what the model's configuration says, which SGLang otherwise refuses."""
    pool_tokens: int = 0
    """Tokens of the key-value pool. Needed on a CPU, where SGLang would take most of the memory."""
    tensor_parallel: int = 1
    memory_fraction: float = 0.0
    """Share of the device's memory for weights and the key-value pool."""
    prefill_graphs: bool = True
    decode_graphs: bool = True
    trust_remote_code: bool = False
    flags: tuple[str, ...] = ()
    """Further flags, after all others."""
    env: Mapping[str, str] = field(default_factory=dict)


def server_argv(python: str, options: ServerOptions, port: int) -> list[str]:
    argv = [
        *(python, "-m", "sglang.launch_server"),
        *("--model-path", str(options.model)),
        *("--host", LOOPBACK, "--port", str(port)),
        *("--device", options.device, "--dtype", options.dtype),
        # Neither structured output nor a first request of the server's own is wanted.
        *("--grammar-backend", "none", "--skip-server-warmup"),
        *("--log-level-http", "warning"),
    ]
    if options.device == "cpu":
        argv += ["--attention-backend", "torch_native", "--sampling-backend", "pytorch"]
    for flag, value in (
        ("--context-length", options.context_length),
        ("--max-total-tokens", options.pool_tokens),
        ("--mem-fraction-static", options.memory_fraction),
        ("--tp-size", options.tensor_parallel if options.tensor_parallel > 1 else 0),
    ):
        if value:
            argv += [flag, str(value)]
    if options.device == "cpu" or not options.prefill_graphs:
        argv += ["--cuda-graph-backend-prefill", "disabled"]
    if options.device == "cpu" or not options.decode_graphs:
        argv += ["--cuda-graph-backend-decode", "disabled"]
    if options.trust_remote_code:
        argv.append("--trust-remote-code")
    return [*argv, *options.flags]


def server_env(options: ServerOptions) -> dict[str, str]:
    """This process's environment, and what the options add."""
    env = os.environ | {"PYTHONUNBUFFERED": "1"}
    if options.device == "cpu":
        env["SGLANG_USE_CPU_ENGINE"] = "1"
    if options.context_length:
        env["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
    return {**env, **options.env}


class Server:
    """A server and every process it started, in a group of their own; they die with this process, however it dies.

    Start it from a thread that lives as long as this process should: the kernel watches the thread.
    """

    def __init__(self, python: str, options: ServerOptions, log_path: Path) -> None:
        self.log_path = log_path
        self.url = ""
        self.ended = asyncio.Event()
        """Set once the server's main process is gone."""
        self._python, self._options = python, options
        self._process: asyncio.subprocess.Process | None = None
        self._reaper: asyncio.Task[None] | None = None

    async def start(self, ready_s: float = READY_S) -> None:
        """Returns when the server accepts requests. Raises HostError SF-SGLANG-START with the end of its log otherwise."""
        port = _free_port()
        self.url = f"http://{LOOPBACK}:{port}"
        argv = server_argv(self._python, self._options, port)
        log.info("SGLang server starts", argv=argv, log=str(self.log_path))
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        if self.log_path.exists():
            # Why the last server died is often only there.
            self.log_path.replace(f"{self.log_path}.1")
        with self.log_path.open("wb") as file:
            self._process = await asyncio.create_subprocess_exec(
                *argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=server_env(self._options),
                start_new_session=True,
                preexec_fn=dies_with(os.getpid(), signal.SIGKILL),
            )
        self._reaper = asyncio.create_task(self._reap(self._process))
        try:
            async with asyncio.timeout(ready_s), SGLangClient(self.url) as client:
                while not await client.ready():
                    if self.ended.is_set():
                        raise self._failed(f"ended with {self._process.returncode}")
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            await self.stop()
            raise self._failed(f"was not ready after {ready_s:.0f} s") from None
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Kills the whole group: SGLang's own way to stop polls every five seconds and then kills its children as well."""
        if self._process is None or self._reaper is None:
            return
        self._kill(self._process.pid)
        await self._reaper

    @property
    def pid(self) -> int:
        """Process id of the server's main process; also the id of its group."""
        assert self._process is not None, "the server was not started"
        return self._process.pid

    async def _reap(self, process: asyncio.subprocess.Process) -> None:
        await process.wait()
        # Schedulers that outlive their parent would keep the device's memory.
        self._kill(process.pid)
        self.ended.set()

    @staticmethod
    def _kill(group: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)

    def _failed(self, how: str) -> HostError:
        tail = self.log_path.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace").strip()
        return HostError(
            "SF-SGLANG-START", f"the SGLang server {how}; the end of {self.log_path}:\n{tail or '(it wrote nothing)'}"
        )


def _free_port() -> int:
    """A loopback port that was free a moment ago. SGLang binds it only once the model is loaded."""
    ports = _ports()
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            port = random.SystemRandom().choice(ports)
            probe.bind((LOOPBACK, port))
            return port


def _ports() -> range:
    """Those that no outgoing connection of this host is given meanwhile, where enough are left."""
    try:
        first, last = map(int, _EPHEMERAL.read_text().split())
    except (OSError, ValueError):  # not Linux
        return range(_LOWEST_PORT, _HIGHEST_PORT + 1)
    below, above = range(_LOWEST_PORT, min(first, _HIGHEST_PORT + 1)), range(last + 1, _HIGHEST_PORT + 1)
    largest = max(below, above, key=len)
    return largest if len(largest) > 1000 else range(_LOWEST_PORT, _HIGHEST_PORT + 1)
