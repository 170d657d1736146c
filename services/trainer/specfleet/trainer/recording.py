"""Recording a feature set: what a window holds is appended to it, and a save is a shard that its manifest lists.

What the manifest lists may be a moment ahead of what the ledger has settled. A recorder that dies in between is handed
those prompts once more, and lets them pass.
"""

import hashlib
from collections.abc import Sequence

import structlog

from specfleet.config.models import RunConfig
from specfleet.contracts.errors import DataError, HostError
from specfleet.contracts.ids import task_key
from specfleet.contracts.states import RunState, TaskState
from specfleet.features.writer import FeatureSetWriter
from specfleet.policies.retries import outcome
from specfleet.trainer.checkpoint import Saved
from specfleet.trainer.link import LinkAbandoned
from specfleet.trainer.loader import Stopwatch, Tensors, Window
from specfleet.trainer.loop import Seat, WindowLoop
from specfleet.trainer.reduction import Sums

log = structlog.get_logger()

# A full disk may be given room; captured samples wait in memory meanwhile, and back-pressure holds capture.
_RETRY_S = 10.0


def sole(samples: Sequence[Tensors]) -> Tensors:
    """The batch of a recorder: one sample as it is."""
    (sample,) = samples
    return sample


class RecordLoop(WindowLoop):
    def __init__(self, seat: Seat, config: RunConfig, writer: FeatureSetWriter) -> None:
        """writer: one that closes no shard by itself, so that every shard ends where a step does."""
        super().__init__(seat)
        self._shard_bytes = config.record.shard_bytes
        self._max_dead_fraction = config.flow.max_dead_fraction
        self._writer = writer

    def _work(self, window: Window, wait_s: float, watch: Stopwatch) -> None:
        writer, sums = self._writer, Sums(num_samples=len(window.batches))
        for sample in window.batches:
            _, prompt_index = sample["visit"].tolist()
            if prompt_index not in writer.recorded:
                writer.add(prompt_index, sample)
            sums.num_tokens += len(sample["input_ids"])
            sums.num_loss_tokens += int(sample["loss_mask"].sum())
        self._done(self.step + 1)
        numbers = {
            "recorded_prompts": len(writer.recorded),
            "recorded_bytes": writer.manifest.num_bytes + writer.pending_bytes,
        }
        self._ack(window.plan, sums, numbers, watch.lap(), wait_s)

    def _due(self) -> bool:
        return self._writer.pending_bytes >= self._shard_bytes

    def _write(self) -> Saved:
        while True:
            try:
                self._writer.flush()
                break
            except HostError as error:
                if self._stop.wait(_RETRY_S):
                    raise
                log.warning("cannot record; trying again", reason=error.message, in_s=_RETRY_S)
        shards = "\n".join(shard.sha256 for shard in self._writer.manifest.shards)
        return Saved(self.step, str(self._writer.directory), hashlib.sha256(shards.encode()).hexdigest())

    def _finish(self) -> bool:
        # Settled first: then nothing is captured again should this process die before the run has ended.
        if not self._save(final=False):
            return False
        if not self._writer.manifest.complete:
            try:
                self._complete()
            except LinkAbandoned:
                return False
        return True

    def _complete(self) -> None:
        """Declares the set complete, unless so many prompts are dead that the run fails: they deserve another try."""
        num_prompts = self._writer.manifest.num_prompts
        missing = [index for index in range(num_prompts) if index not in self._writer.recorded]
        dead = {index: self._reason(index) for index in missing}
        if outcome(len(dead), num_prompts, self._max_dead_fraction) == RunState.FAILED:
            log.error("too many prompts are dead; the set stays incomplete", dead=len(dead), prompts=num_prompts)
            return
        manifest = self._writer.finish(dead)
        log.info("complete", prompts=manifest.rows, dead=len(dead), bytes=manifest.num_bytes)

    def _reason(self, prompt_index: int) -> str:
        """Why a prompt is dead. Raises DataError SF-RECORD-GONE when it is not: then the set has lost it."""
        task = self._link.explain(task_key(self._run_id, 0, prompt_index), self._give_up)
        if task.state != TaskState.DEAD:
            raise DataError(
                "SF-RECORD-GONE",
                f"{self._writer.directory} lacks prompt {prompt_index}, which run {self._run_id} counts as {task.state}: the set "
                "was changed while it was recorded. Run the same specctl data capture again: it records what is missing",
            )
        return str(task.reason)
