"""The loop of one rank: agree on the next window, do its work, acknowledge it, save when due."""

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import structlog

from specfleet.contracts.errors import ContractError
from specfleet.contracts.ids import sample_id
from specfleet.trainer.checkpoint import Saved
from specfleet.trainer.link import Link, LinkAbandoned
from specfleet.trainer.loader import Loader, Stopwatch, Window
from specfleet.trainer.parallel import Ranks
from specfleet.trainer.reduction import Sums
from specfleet.trainer.stop import Stop
from specfleet.wire.records_pb2 import StepPlan
from specfleet.wire.trainer_pb2 import AckStepRequest, CommitCheckpointRequest, DetachRunRequest

log = structlog.get_logger()

Next = Literal["work", "end", "stop", "fenced"]


@dataclass(frozen=True)
class Seat:
    """One rank's place in one generation of a run: what every loop works with."""

    run_id: str
    generation: int
    ranks: Ranks
    link: Link
    loader: Loader
    stop: Stop
    saved: Saved
    """Where the generation starts from."""


class WindowLoop(ABC):
    """Goes from `saved.step + 1` until the run ends, is stopped, or this generation is fenced.

    What is done with a window, and what makes it durable, is the subclass's: a draft is trained (training.py), or a
    feature set recorded (recording.py).
    """

    def __init__(self, seat: Seat) -> None:
        self._run_id = seat.run_id
        self._generation = seat.generation
        self._ranks = seat.ranks
        self._link = seat.link
        self._loader = seat.loader
        self._stop = seat.stop
        self._saved = seat.saved
        self.step = seat.saved.step
        """The last step done."""

    @abstractmethod
    def _work(self, window: Window, wait_s: float, watch: Stopwatch) -> None:
        """Does step `self.step + 1` and calls `_done` when it is done."""

    @abstractmethod
    def _due(self) -> bool:
        """Whether to save after the step that was just done."""

    @abstractmethod
    def _write(self) -> Saved:
        """Makes everything up to `self.step` durable. Collective."""

    def _finish(self) -> bool:
        """Every window is done; what is left before the final save. False: leave without it."""
        return True

    def run(self) -> str:
        """Returns why it left: `end`, `stop` or `fenced`."""
        while True:
            watch = Stopwatch()
            verdict, window, reason = self._agree()
            if window is None:
                return self._leave(verdict, reason)
            self._work(window, wait_s=watch.lap(), watch=watch)
            if self._due() and not self._save(final=False):
                return self._leave("fenced" if self._link.fenced else "stop", self._stop.reason)

    def _agree(self) -> tuple[Next, Window | None, str]:
        """The same decision on every rank: a window of the same step and revision, or to leave.

        Ranks hear of plans, re-issues, stops and signals at different times, so each says what it has, and one that has
        an older revision than another waits for the newer plan.
        """
        revision = 0
        while True:
            found = self._loader.next(revision, self._must_leave)
            told = self._ranks.gather(self._fact(found))
            states = {fact["state"] for fact in told}
            reason = next((fact["reason"] for fact in told if fact["reason"]), "")
            if "fenced" in states:
                return "fenced", None, reason
            if "stop" in states:
                return "stop", None, reason
            newest = max(fact["revision"] for fact in told)
            if any(fact["revision"] < newest for fact in told):
                revision = newest
                continue
            if len(states) > 1:
                raise ContractError(
                    "SF-TRAIN-PLAN-SPLIT",
                    f"step {self.step + 1} revision {newest}: some ranks got a window, some the end of the run: {told}",
                )
            return ("end", None, "") if states == {"end"} else ("work", found, "")  # type: ignore[return-value]

    def _fact(self, found: Window | StepPlan | None) -> dict[str, Any]:
        match found:
            case Window(plan=plan):
                return {"state": "work", "revision": plan.revision, "reason": ""}
            case StepPlan(kind=StepPlan.KIND_END):
                return {"state": "end", "revision": found.revision, "reason": ""}
            case StepPlan():
                return {"state": "stop", "revision": 0, "reason": found.reason or "stopped by the coordinator"}
            case _:
                state = "fenced" if self._link.fenced else "stop"
                return {"state": state, "revision": 0, "reason": self._stop.reason}

    def _must_leave(self) -> bool:
        self._link.check()
        return self._stop.requested or self._link.fenced

    def _done(self, step: int) -> None:
        self.step = step
        self._loader.trained(step)

    def _ack(self, plan: StepPlan, sums: Sums, metrics: Mapping[str, float], step_s: float, wait_s: float) -> None:
        request = AckStepRequest(
            run_id=plan.run_id,
            generation=plan.generation,
            step=plan.step,
            rank=plan.rank,
            revision=plan.revision,
            digest=sample_digest(plan),
            num_tokens=sums.num_tokens,
            num_loss_tokens=sums.num_loss_tokens,
            # A value that is not finite is logged here; no reader of JSON downstream could take it.
            metrics={name: value for name, value in metrics.items() if math.isfinite(value)},
            step_s=step_s,
            wait_s=wait_s,
        )
        self._link.ack(request)

    def _save(self, final: bool) -> bool:
        """Writes and commits the current step. False when the ledger did not take it: leave."""
        if self._saved.step != self.step or not self._saved.digest:
            # The acks of this step travel while the files are written.
            self._saved = self._write()
        # The ledger settles up to a trained step only, and a step is trained when every rank's ack is in.
        acked = self._link.flush(self._give_up)
        if not all(fact["acked"] for fact in self._ranks.gather({"acked": acked})):
            return False
        committed = False
        if self._ranks.leads:
            committed = self._commit(final)
        return bool(self._ranks.gather({"committed": committed})[0]["committed"])

    def _commit(self, final: bool) -> bool:
        """Rank 0 only. False when the ledger did not take it."""
        request = CommitCheckpointRequest(
            run_id=self._run_id,
            generation=self._generation,
            step=self.step,
            uri=self._saved.uri,
            digest=self._saved.digest,
            final=final,
        )
        try:
            accepted = self._link.commit(request, self._give_up)
        except LinkAbandoned:
            log.warning("left before the coordinator took the checkpoint", step=self.step)
            return False
        log.info("checkpoint", step=self.step, uri=self._saved.uri, accepted=accepted, final=final)
        return accepted

    def _give_up(self) -> bool:
        return self._stop.overdue

    def _leave(self, verdict: Next, reason: str) -> str:
        log.info("leaving", verdict=verdict, reason=reason, step=self.step)
        if verdict == "end":
            if self._finish():
                self._save(final=True)
        elif verdict == "stop":
            # Another rank's reason to leave is this rank's too, with the same patience.
            self._stop.request(reason or "stop")
            if self.step > self._saved.step:
                self._save(final=False)
            detach = DetachRunRequest(
                run_id=self._run_id, generation=self._generation, rank=self._ranks.rank, reason=reason
            )
            if not self._link.fenced:
                self._link.detach(detach, self._give_up)
        return verdict


def sample_digest(plan: StepPlan) -> str:
    """sha256 over the sample ids of a plan, in order, one per line."""
    ids = [sample_id(ref.attempt) for micro_batch in plan.micro_batches for ref in micro_batch.samples]
    return hashlib.sha256("\n".join(ids).encode()).hexdigest()
