"""specfleet's own path from prompts to exported drafts: the functions behind specctl's commands, on an embedded stack."""

import os
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from benchmarks.strategies.cases import MAX_LENGTH, RECIPES, case_of
from specfleet.config import RunConfig, load_config
from specfleet.contracts.errors import SpecfleetError
from specfleet.contracts.states import TERMINAL_RUN_STATES
from specfleet.ctl import gatework
from specfleet.ctl.client import WATCH_PATIENCE_S, Client
from specfleet.ctl.rates import RateMeter
from specfleet.ctl.recording import build_recording, conclusion
from specfleet.ctl.stack import UpOptions, start_detached, stop
from specfleet.ctl.state import log_tail
from specfleet.ctl.submission import build_submission
from specfleet.ctl.topology import StoreKind
from specfleet.target.facts import build_contract, read_target_facts
from specfleet.wire.run_pb2 import ListRunsRequest, RunSnapshot, SubmitRunRequest

Say = Callable[[str], None]

SHARD_BYTES = 256 << 20
# Of GPU memory, for each server. Generous: what it really takes is bounded in tokens, and others start at the same time.
MEMORY_FRACTION = 0.5
# Tokens of prompts that the capture server holds at once.
CAPTURE_TOKENS = 131_072
# A kill costs at most so many steps; a save costs about a second.
CHECKPOINT_STEPS = 400
LOGS = ("supervisor", "coordinator", "capture", "sglang", "trainer", "gate")
LOG_LINES = 25
# Between two looks at a run, and between two progress lines.
POLL_S = 0.5
LINE_EVERY_S = 10.0


@dataclass(frozen=True)
class Job:
    """What is captured and trained. names: cases of the comparison of strategies, each with its recipe and settings."""

    target: Path
    data: str
    device: str
    names: list[str]
    samples: int
    response_tokens: int
    epochs: int
    batch_size: int

    def overrides(self, name: str) -> list[str]:
        """Everything in which a run of this benchmark differs from the case's recipe."""
        case = case_of(name)
        return [
            f"model.target={self.target}", f"data.max_length={MAX_LENGTH}", f"data.seed={case.seed}",
            f"trainer.seed={case.seed}", f"trainer.batch_size={self.batch_size}", f"trainer.epochs={self.epochs}",
            f"trainer.device={self.device}", f"checkpoint.every_steps={CHECKPOINT_STEPS}", *case.settings,
        ]  # fmt: skip

    def recipe(self, name: str) -> Path:
        return RECIPES / f"{case_of(name).recipe}.yaml"

    def config(self, name: str) -> RunConfig:
        return load_config(self.recipe(name), self.overrides(name))

    def layers(self, name: str) -> list[int]:
        """Target layers that the case reads."""
        return list(build_contract(self.config(name), read_target_facts(self.target)).layers)

    def recording(self) -> list[str]:
        """Overrides of the first case's recipe under which one capture serves every case."""
        layers = sorted({layer for name in self.names for layer in self.layers(name)})
        extras = sorted({extra for name in self.names for extra in self.config(name).capture.extras})
        return [
            *self.overrides(self.names[0]), f"strategy.layers={layers}", f"capture.extras={extras}",
            "capture.engine=sglang", f"data.train=[{self.data}]", "data.filter={split: [train]}",
            f"data.max_samples={self.samples}", f"data.max_response_tokens={self.response_tokens}",
            # Prompts of these data are short: enough of them under way to keep the server busy; the pool bounds them as well.
            "capture.max_batch_tokens=32768", "flow.high_samples=1024", "flow.low_samples=768",
        ]  # fmt: skip


def run_id(name: str) -> str:
    """Of a case's run, and of everything that comes from it: the case's name without its settings."""
    return name.split(":")[0].replace(".", "-")


class Product:
    """A running stack in a folder of its own; it ends with this process."""

    def __init__(self, work: Path, store: StoreKind, pool_bytes: int, slots: int, say: Say) -> None:
        self._work, self._folder, self._features, self._say = work, work / "stack", work / "features", say
        options = UpOptions(self._folder, store, pool_bytes, "sglang", slots=slots)
        self._addresses = start_detached(options, with_parent=True).addresses

    def __enter__(self) -> Self:
        return self

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        if failure is not None:
            for name in LOGS:
                self._say(f"end of {name}.log:\n{log_tail(self._folder, name, LOG_LINES)}")
        stop(self._folder)

    def _client(self, service: str) -> Client:
        return Client(self._addresses[service], patience_s=WATCH_PATIENCE_S)

    def record(self, job: Job) -> dict[str, Any]:
        """`specctl data capture`: real SGLang captures every prompt once, the store carries it, the trainer writes the set."""
        overrides = [*job.recording(), f"deployment.output_dir={self._work / 'runs'}"]
        with self._client("coordinator") as client:
            runs = client.call(client.runs.ListRuns, ListRunsRequest()).runs
            request = build_recording(job.recipe(job.names[0]), overrides, self._features, SHARD_BYTES, runs, self._say)
            told: dict[str, Any] = {}
            if request is not None:
                self._submit(client, request)
                told = self._follow(client, [request.run_id])[request.run_id]
        facts, problems = conclusion(self._features)
        if problems:
            raise SpecfleetError("SF-BENCH-FEATURES", f"{self._features} is not sound: {'; '.join(problems)}")
        return {**facts, **{name: told.get(name) for name in ("captured_tokens_per_s", "peak_in_flight_bytes")}}

    def train(self, job: Job) -> dict[str, dict[str, Any]]:
        """`specctl run submit` of every case: they train at the same time, since one GPU serves several small drafts."""
        with self._client("coordinator") as client:
            for name in job.names:
                overrides = [
                    *job.overrides(name), "data.source=features", f"data.features={self._features}",
                    f"deployment.output_dir={self._work / 'runs'}",
                ]  # fmt: skip
                self._submit(client, build_submission(job.recipe(name), overrides, run_id(name), report=self._say))
            return self._follow(client, [run_id(name) for name in job.names])

    def _submit(self, client: Client, request: SubmitRunRequest) -> None:
        """Hands a run over, unless an earlier life did."""
        known = {run.run_id for run in client.call(client.runs.ListRuns, ListRunsRequest()).runs}
        if request.run_id not in known:
            client.call(client.runs.SubmitRun, request, timeout_s=300)

    def _follow(self, client: Client, run_ids: Sequence[str]) -> dict[str, dict[str, Any]]:
        """What came of the runs. Raises SpecfleetError SF-BENCH-RUN with the ends of its logs when one fails."""
        ended: dict[str, dict[str, Any]] = {}
        meters, spoke = {name: RateMeter() for name in run_ids}, time.monotonic()
        while len(ended) < len(run_ids):
            time.sleep(POLL_S)
            runs = {name: gatework.get_run(client, name) for name in run_ids if name not in ended}
            now = time.monotonic()
            for name, run in runs.items():
                meters[name].add(now, run)
                if run.state in TERMINAL_RUN_STATES:
                    ended[name] = _outcome(run, meters[name])
            if now - spoke > LINE_EVERY_S:
                spoke = now
                self._say("; ".join(map(_line, runs.values())))
        return ended

    def export(self, name: str) -> str:
        """`specctl export` of the run's last checkpoint: the directory."""
        with self._client("coordinator") as runs, self._client("gate") as gates:
            run = gatework.get_run(runs, run_id(name))
            return gatework.export_draft(gates, run, gatework.find_checkpoint(runs, run_id(name)), "sglang").output_dir


def _line(run: RunSnapshot) -> str:
    return (
        f"{run.run_id} {run.state} {run.reason} step {run.trained_steps} of {run.total_steps}, "
        f"{run.captured_tokens:,} tokens captured, {run.trained_tokens:,} trained"
    )


def _outcome(run: RunSnapshot, meter: RateMeter) -> dict[str, Any]:
    if run.state not in ("SUCCEEDED", "DEGRADED"):
        logs = sorted((Path(run.output_dir) / "logs").glob("*.log"))
        ends = [
            "\n".join([f"end of {log}:", *log.read_text(errors="replace").splitlines()[-LOG_LINES:]]) for log in logs
        ]
        raise SpecfleetError("SF-BENCH-RUN", "\n".join([f"run {run.run_id} ended {run.state}: {run.reason}", *ends]))
    captured = {
        "captured_tokens_per_s": round(meter.captured.per_s),
        "peak_in_flight_bytes": meter.peak_in_flight_bytes,
    }
    return {
        **(captured if run.captured_tokens else {}),
        "state": run.state,
        "steps": run.trained_steps,
        "tokens": run.trained_tokens,
        "tokens_per_s": round(meter.trained.per_s),
        "wait_share": round(meter.wait_share, 4),
        "metrics": {key: round(value, 4) for key, value in run.metrics.items()},
    }


def environment(device: str, flags: Sequence[str]) -> None:
    """How the stack's services start their servers: they inherit this process's environment."""
    os.environ["SPECFLEET_DEVICE"] = device
    if device != "cpu":
        flags = [*flags, "--max-total-tokens", str(CAPTURE_TOKENS)]
        os.environ["SPECFLEET_MEMORY_FRACTION"] = str(MEMORY_FRACTION)
    os.environ["SPECFLEET_SGLANG_FLAGS"] = shlex.join(flags)
