"""The training loop of one rank: agree on the next window, train it, acknowledge it, checkpoint when due."""

import hashlib
import math
import time
from typing import Any, Literal

import structlog

from specfleet.config.models import RunConfig
from specfleet.contracts.errors import ContractError
from specfleet.contracts.ids import sample_id
from specfleet.trainer.checkpoint import CheckpointFolder, Facts, Saved
from specfleet.trainer.link import Link, LinkAbandoned
from specfleet.trainer.loader import Loader, Stopwatch, Window
from specfleet.trainer.metrics import MetricsFile, TensorBoard
from specfleet.trainer.optim import MasterAdamW, learning_rate
from specfleet.trainer.parallel import Ranks
from specfleet.trainer.reduction import Sums, accumulate
from specfleet.trainer.stop import Stop
from specfleet.trainer.strategies.base import Strategy
from specfleet.wire.records_pb2 import StepPlan
from specfleet.wire.trainer_pb2 import AckStepRequest, CommitCheckpointRequest, DetachRunRequest

log = structlog.get_logger()

Next = Literal["train", "end", "stop", "fenced"]


class TrainLoop:
    """Trains from `saved.step + 1` until the run ends, is stopped, or this generation is fenced."""

    def __init__(
        self,
        config: RunConfig,
        facts: Facts,
        strategy: Strategy,
        optimizer: MasterAdamW,
        ranks: Ranks,
        *,
        link: Link,
        loader: Loader,
        folder: CheckpointFolder,
        stop: Stop,
        saved: Saved,
        total_steps: int,
        trackers: list[MetricsFile | TensorBoard],
    ) -> None:
        self._config = config
        self._facts = facts
        self._strategy = strategy
        self._optimizer = optimizer
        self._ranks = ranks
        self._link = link
        self._loader = loader
        self._folder = folder
        self._stop = stop
        self._saved = saved
        self._total_steps = total_steps
        self._trackers = trackers
        self.step = saved.step
        """The last step trained."""

    def run(self) -> str:
        """Returns why it left: `end`, `stop` or `fenced`."""
        while True:
            watch = Stopwatch()
            verdict, window, reason = self._agree()
            if window is None:
                return self._leave(verdict, reason)
            self._train(window, wait_s=watch.lap(), watch=watch)
            if self.step % self._config.checkpoint.every_steps == 0 and not self._save(final=False):
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
            return ("end", None, "") if states == {"end"} else ("train", found, "")  # type: ignore[return-value]

    def _fact(self, found: Window | StepPlan | None) -> dict[str, Any]:
        match found:
            case Window(plan=plan):
                return {"state": "train", "revision": plan.revision, "reason": ""}
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

    def _train(self, window: Window, wait_s: float, watch: Stopwatch) -> None:
        step = self.step + 1
        self._strategy.begin_step(step)
        share = accumulate(self._strategy, window.batches, self._optimizer, self._ranks)
        trainer = self._config.trainer
        lr = learning_rate(
            step - 1,
            peak=trainer.lr,
            total=self._total_steps,
            warmup_ratio=trainer.warmup_ratio,
            schedule=trainer.lr_schedule,
        )
        norm = self._optimizer.step(lr, self._ranks)
        # Only now the host waits for the device, once per step: an ack says that the step is done.
        sums, grad_norm = share.read(), float(norm)
        sums.num_samples = sum(len(micro_batch.samples) for micro_batch in window.plan.micro_batches)
        if not math.isfinite(grad_norm):
            log.error("gradient is not finite; weights left as they were", step=step, grad_norm=grad_norm)
        self.step = step
        self._loader.trained(step)
        total = Sums.total(self._ranks.gather(sums.fact()))
        step_s = watch.lap()
        metrics = self._metrics(total, grad_norm, lr)
        self._link.ack(self._ack(window.plan, sums, metrics if self._ranks.leads else {}, step_s, wait_s))
        if self._ranks.leads:
            self._record(window.plan, metrics, total, step_s, wait_s)

    def _metrics(self, total: Sums, grad_norm: float, lr: float) -> dict[str, float]:
        metrics = {"loss": total.pairs.get("loss", (0.0, 0.0))[0], "grad_norm": grad_norm, "lr": lr}
        for name, (numerator, denominator) in total.pairs.items():
            if name != "loss" and denominator > 0:
                metrics[name] = numerator / denominator
        return metrics

    def _ack(
        self, plan: StepPlan, sums: Sums, metrics: dict[str, float], step_s: float, wait_s: float
    ) -> AckStepRequest:
        return AckStepRequest(
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

    def _record(self, plan: StepPlan, metrics: dict[str, float], total: Sums, step_s: float, wait_s: float) -> None:
        line = {
            "step": plan.step,
            "epoch": plan.epoch,
            **{name: value if math.isfinite(value) else None for name, value in metrics.items()},
            "samples": total.num_samples,
            "tokens": total.num_tokens,
            "loss_tokens": total.num_loss_tokens,
            "tokens_per_s": round(total.num_tokens / max(1e-9, step_s + wait_s), 3),
            "wait_s": round(wait_s, 6),
            "step_s": round(step_s, 6),
            "time": time.time(),
        }
        for tracker in self._trackers:
            tracker.write(line)
        if plan.step % self._config.tracking.log_every == 0:
            log.info("trained", of=self._total_steps, **line)

    def _save(self, final: bool) -> bool:
        """Writes and commits a checkpoint of the current step. False when the ledger did not take it: leave."""
        if self._saved.step != self.step or not self._saved.digest:
            # The acks of this step travel while the files are written.
            self._saved = self._folder.save(self.step, self._facts, self._strategy.draft, self._optimizer, self._ranks)
        for tracker in self._trackers:
            tracker.sync()
        # The ledger settles up to a trained step only, and a step is trained when every rank's ack is in.
        acked = self._link.flush(self._give_up)
        if not all(fact["acked"] for fact in self._ranks.gather({"acked": acked})):
            return False
        committed = False
        if self._ranks.leads:
            committed = self._commit(final)
        committed = bool(self._ranks.gather({"committed": committed})[0]["committed"])
        if committed and self._ranks.leads:
            self._folder.rotate(self._config.checkpoint.keep, self.step)
        return committed

    def _commit(self, final: bool) -> bool:
        request = CommitCheckpointRequest(
            run_id=self._facts.run_id,
            generation=self._facts.generation,
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
            self._save(final=True)
        elif verdict == "stop":
            # Another rank's reason to leave is this rank's too, with the same patience.
            self._stop.request(reason or "stop")
            if self.step > self._saved.step:
                self._save(final=False)
            detach = DetachRunRequest(
                run_id=self._facts.run_id, generation=self._facts.generation, rank=self._ranks.rank, reason=reason
            )
            if not self._link.fenced:
                self._link.detach(detach, self._give_up)
        return verdict


def sample_digest(plan: StepPlan) -> str:
    """sha256 over the sample ids of a plan, in order, one per line."""
    ids = [sample_id(ref.attempt) for micro_batch in plan.micro_batches for ref in micro_batch.samples]
    return hashlib.sha256("\n".join(ids).encode()).hexdigest()
