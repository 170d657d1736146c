"""The one interface to an engine, and the checks that hold for every engine. Blocking; runs in the worker's thread."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from specfleet.contracts.capture import feature_table
from specfleet.contracts.errors import CaptureItemError
from specfleet.wire.records_pb2 import CaptureContract, PromptTask

Tensors = dict[str, torch.Tensor]


class Engine(ABC):
    """A loaded target that captures hidden states."""

    version: str
    """Name and version of the software that runs the target, as in "transformers 5.5.0"."""

    @abstractmethod
    def attest(self) -> CaptureContract:
        """The facts of the loaded target as measured from its files and modules, never copied from the request."""

    @abstractmethod
    def capture(self, batch: Sequence[PromptTask]) -> list[Tensors | CaptureItemError]:
        """One forward pass over prompts that fit one batch. Results in the batch's order, one per prompt.

        Tensors are contiguous CPU tensors: aux_states [T, K·H], final_state [T, H] and extras, as the feature table of
        the contract lists them. A prompt that cannot be captured yields a CaptureItemError and spares its neighbours.
        Raises only when the engine itself failed: then no prompt of the batch is to blame.
        """

    @abstractmethod
    def close(self) -> None:
        """Frees the target's memory."""


def check_task(task: PromptTask, contract: CaptureContract, contract_hash: str) -> None:
    """Raises CaptureItemError SF-CAPTURE-PROMPT when the prompt cannot be captured under the contract."""
    tokens, vocab = len(task.input_ids), contract.vocab_size
    if task.contract_hash != contract_hash:
        raise CaptureItemError(
            "SF-CAPTURE-PROMPT",
            f"the prompt asks for contract {task.contract_hash}, this worker serves {contract_hash}",
        )
    if tokens == 0:
        raise CaptureItemError("SF-CAPTURE-PROMPT", "the prompt has no tokens")
    if len(task.loss_mask) != tokens:
        raise CaptureItemError("SF-CAPTURE-PROMPT", f"loss_mask has {len(task.loss_mask)} bytes for {tokens} tokens")
    low, high = min(task.input_ids), max(task.input_ids)
    if low < 0 or high >= vocab:
        raise CaptureItemError("SF-CAPTURE-PROMPT", f"token ids {low}..{high} leave the vocabulary 0..{vocab - 1}")
    unknown = set(task.features) - set(feature_table(contract))
    if unknown:
        raise CaptureItemError("SF-CAPTURE-PROMPT", f"features {sorted(unknown)} are not in contract {contract_hash}")


def complete(task: PromptTask, contract: CaptureContract, captured: Tensors) -> Tensors:
    """The features the task asks for (all when it names none), in feature-table order, checked.

    input_ids [T] int32 and loss_mask [T] uint8 are made from the task; the rest comes from `captured`. Raises
    CaptureItemError SF-CAPTURE-MISSING, SF-CAPTURE-SHAPE or SF-CAPTURE-NONFINITE.
    """
    tensors = dict(captured)
    tensors["input_ids"] = torch.tensor(list(task.input_ids), dtype=torch.int32)
    tensors["loss_mask"] = torch.frombuffer(bytearray(task.loss_mask), dtype=torch.uint8)
    wanted = set(task.features)
    table = {name: row for name, row in feature_table(contract).items() if not wanted or name in wanted}
    for name, (dtype, elements) in table.items():
        _check(name, tensors.get(name), dtype, len(task.input_ids), elements)
    return {name: tensors[name] for name in table}


def _check(name: str, tensor: torch.Tensor | None, dtype: str, tokens: int, elements: int) -> None:
    if tensor is None:
        raise CaptureItemError("SF-CAPTURE-MISSING", f"the engine returned no {name}")
    shapes = {(tokens,), (tokens, 1)} if elements == 1 else {(tokens, elements)}
    found = str(tensor.dtype).removeprefix("torch.")
    if tuple(tensor.shape) not in shapes or found != dtype:
        raise CaptureItemError(
            "SF-CAPTURE-SHAPE",
            f"{name} is {found} {list(tensor.shape)}; {tokens} tokens need {dtype} {list(min(shapes))}",
        )
    if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
        bad = int((~torch.isfinite(tensor)).sum())
        raise CaptureItemError("SF-CAPTURE-NONFINITE", f"{name} holds {bad} NaN or infinite values of {tensor.numel()}")
