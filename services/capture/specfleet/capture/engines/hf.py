"""The reference engine: transformers with hooks on the captured layers. The default on machines without a GPU."""

from collections.abc import Sequence
from pathlib import Path

import structlog
import torch
import transformers

from specfleet.capture.engines.base import ForwardEngine, Tensors, resolve_device
from specfleet.contracts.errors import CaptureItemError
from specfleet.target.facts import read_target_facts
from specfleet.target.hf import HFTarget
from specfleet.wire.records_pb2 import CaptureContract, PromptTask

log = structlog.get_logger()


class HFEngine(ForwardEngine):
    """HFTarget behind the engine interface. `path` is the directory that is really loaded."""

    def __init__(self, path: Path, contract: CaptureContract, device: str) -> None:
        self.version = f"transformers {transformers.__version__} torch {torch.__version__}"
        self._asked = contract
        self._facts = read_target_facts(path)
        # A progress bar has no place among JSON log lines.
        transformers.utils.logging.disable_progress_bar()
        self._target: HFTarget | None = HFTarget.load(
            path,
            tuple(contract.layers),
            contract.dtype,
            resolve_device(device),
            contract.final_state,
            tuple(contract.extras),
            trust_remote_code=contract.trust_remote_code,
        )

    def attest(self) -> CaptureContract:
        facts, target = self._facts, self._loaded()
        return CaptureContract(
            target=self._asked.target,
            weights_hash=facts.weights_hash,
            tokenizer_hash=facts.tokenizer_hash,
            layers=list(target.layers),
            final_state=target.final_state,
            dtype=str(target.dtype).removeprefix("torch."),
            hidden_size=facts.hidden_size,
            num_hidden_layers=facts.num_hidden_layers,
            vocab_size=facts.vocab_size,
            engine="hf",
            extras=list(target.extras),
            trust_remote_code=self._asked.trust_remote_code,
        )

    def capture(self, batch: Sequence[PromptTask]) -> list[Tensors | CaptureItemError]:
        try:
            return self._forward(batch)
        except (RuntimeError, ValueError, IndexError) as error:
            log.warning("batch failed; capturing its prompts one by one", prompts=len(batch), error=str(error))
            return self._one_by_one(batch, error)

    def _one_by_one(self, batch: Sequence[PromptTask], batch_error: Exception) -> list[Tensors | CaptureItemError]:
        """Finds out who is to blame: the prompt when others (or a one-token probe) pass, else the engine."""
        results: list[Tensors | CaptureItemError] = []
        for task in batch:
            try:
                results.extend(self._forward([task]))
            except (RuntimeError, ValueError, IndexError) as error:
                message = f"forward pass over {len(task.input_ids)} tokens failed: {type(error).__name__}: {error}"
                results.append(CaptureItemError("SF-CAPTURE-FORWARD", message))
        if all(isinstance(result, CaptureItemError) for result in results):
            try:
                self._loaded().capture([[0]])
            except (RuntimeError, ValueError, IndexError):
                raise batch_error from None
        return results

    def _forward(self, batch: Sequence[PromptTask]) -> list[Tensors | CaptureItemError]:
        return self._loaded().capture([list(task.input_ids) for task in batch])

    def _loaded(self) -> HFTarget:
        if self._target is None:
            raise RuntimeError("the engine is closed")
        return self._target

    async def close(self) -> None:
        self._target = None
