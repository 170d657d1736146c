"""Training a draft: each window is one optimizer step, and a save is a checkpoint."""

import math
import time

import structlog

from specfleet.config.models import RunConfig
from specfleet.trainer.checkpoint import CheckpointFolder, Facts, Saved
from specfleet.trainer.loader import Stopwatch, Window
from specfleet.trainer.loop import Seat, WindowLoop
from specfleet.trainer.metrics import MetricsFile, TensorBoard
from specfleet.trainer.optim import MasterAdamW, learning_rate
from specfleet.trainer.reduction import Sums, accumulate
from specfleet.trainer.strategies.base import Strategy
from specfleet.wire.records_pb2 import StepPlan

log = structlog.get_logger()


class TrainLoop(WindowLoop):
    def __init__(
        self,
        seat: Seat,
        config: RunConfig,
        facts: Facts,
        strategy: Strategy,
        optimizer: MasterAdamW,
        *,
        folder: CheckpointFolder,
        total_steps: int,
        trackers: list[MetricsFile | TensorBoard],
    ) -> None:
        super().__init__(seat)
        self._config = config
        self._facts = facts
        self._strategy = strategy
        self._optimizer = optimizer
        self._folder = folder
        self._total_steps = total_steps
        self._trackers = trackers

    def _work(self, window: Window, wait_s: float, watch: Stopwatch) -> None:
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
        self._done(step)
        total = Sums.total(self._ranks.gather(sums.fact()))
        step_s = watch.lap()
        metrics = self._metrics(total, grad_norm, lr)
        self._ack(window.plan, sums, metrics if self._ranks.leads else {}, step_s, wait_s)
        if self._ranks.leads:
            self._record(window.plan, metrics, total, step_s, wait_s)

    def _metrics(self, total: Sums, grad_norm: float, lr: float) -> dict[str, float]:
        metrics = {"loss": total.pairs.get("loss", (0.0, 0.0))[0], "grad_norm": grad_norm, "lr": lr}
        for name, (numerator, denominator) in total.pairs.items():
            if name != "loss" and denominator > 0:
                metrics[name] = numerator / denominator
        return metrics

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

    def _due(self) -> bool:
        return self.step % self._config.checkpoint.every_steps == 0

    def _write(self) -> Saved:
        saved = self._folder.save(self.step, self._facts, self._strategy.draft, self._optimizer, self._ranks)
        for tracker in self._trackers:
            tracker.sync()
        return saved

    def _commit(self, final: bool) -> bool:
        committed = super()._commit(final)
        if committed:
            self._folder.rotate(self._config.checkpoint.keep, self.step)
        return committed
