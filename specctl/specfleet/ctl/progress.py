"""The live line of a run: how far it is, and its numbers."""

from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from specfleet.ctl.output import console, human_rate
from specfleet.ctl.views import in_flight, training_rate
from specfleet.wire.run_pb2 import RunSnapshot

# Without a terminal one line per this many seconds is plenty for a log file.
LINE_EVERY_S = 10.0


@dataclass(frozen=True)
class Measure:
    """How far a run is."""

    unit: str
    done: int
    total: int
    numbers: str


def training(run: RunSnapshot) -> Measure:
    return Measure("step", run.trained_steps, run.total_steps, numbers_line(run))


def numbers_line(run: RunSnapshot) -> str:
    """capture · training · actual · wait · in flight · loss."""
    loss = run.metrics.get("loss")
    parts = [
        f"capture {human_rate(run.capture_rate)}",
        f"training {human_rate(training_rate(run))}",
        f"actual {human_rate(run.train_rate)}",
        f"wait {run.wait_share:.0%}",
        f"in flight {in_flight(run)}",
        *([] if loss is None else [f"loss {loss:.3f}"]),
    ]
    return " · ".join(parts)


class RunProgress:
    """A progress bar on a terminal, one line now and then elsewhere. Messages go to stderr."""

    def __init__(self, out: Console | None = None, measure: Callable[[RunSnapshot], Measure] = training) -> None:
        self._measure = measure
        self._out = out or console(stderr=True)
        self._live = self._out.is_terminal
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[numbers]}"),
            console=self._out,
            disable=not self._live,
        )
        self._task = self._progress.add_task("waiting", total=None, numbers="")
        self._printed_at = float("-inf")
        self._state = ""

    def __enter__(self) -> "RunProgress":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def update(self, run: RunSnapshot) -> None:
        state = f"{run.state} ({run.reason})" if run.reason else run.state
        found = self._measure(run)
        self._progress.update(
            self._task,
            description=f"{run.run_id} {state}",
            completed=found.done,
            total=found.total or None,
            numbers=found.numbers,
        )
        now = self._progress.get_time()
        if not self._live and (state != self._state or now - self._printed_at >= LINE_EVERY_S):
            line = f"{run.run_id} {state} {found.unit} {found.done}/{found.total} · {found.numbers}"
            self._out.print(line, markup=False, soft_wrap=True)
            self._printed_at, self._state = now, state
