"""The two interfaces to an engine, and the checks that hold for every engine.

A forward engine runs in the worker and hands tensors over; the worker stores them. A serving engine is asked for one prompt
at a time, many at once, and its own processes store the features, so that no tensor crosses a process boundary twice.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from specfleet.contracts.capture import feature_table
from specfleet.contracts.errors import CaptureItemError
from specfleet.contracts.ids import feature_key
from specfleet.store.tensors import dtype_name
from specfleet.wire.records_pb2 import CaptureContract, FeatureSpec, PromptTask

Tensors = dict[str, torch.Tensor]


class Engine(ABC):
    """A loaded target that captures hidden states."""

    version: str
    """Name and version of the software that runs the target, as in "transformers 5.5.0"."""
    plugin_version: str = ""
    """Version of what was added to that software, where something was."""

    @abstractmethod
    def attest(self) -> CaptureContract:
        """The facts of the loaded target as measured from its files and modules, never copied from the request."""

    @abstractmethod
    async def close(self) -> None:
        """Frees the target's memory."""


class ForwardEngine(Engine):
    """Captures batches in this process."""

    @abstractmethod
    def capture(self, batch: Sequence[PromptTask]) -> list[Tensors | CaptureItemError]:
        """One forward pass over prompts that fit one batch. Blocking. Results in the batch's order, one per prompt.

        Tensors are contiguous CPU tensors: aux_states [T, K·H], final_state [T, H] and extras, as the feature table of
        the contract lists them. A prompt that cannot be captured yields a CaptureItemError and spares its neighbours.
        Raises only when the engine itself failed: then no prompt of the batch is to blame.
        """


class ServingEngine(Engine):
    """Captures prompts through servers that batch by themselves and store the features."""

    lost: asyncio.Event
    """Set when the engine must be loaded anew: a server is gone, hangs or changed. Requests under way fail or end."""
    most_tokens: int
    """Tokens that all servers together can work on; more only queue."""

    @abstractmethod
    async def capture(self, task: PromptTask) -> list[FeatureSpec]:
        """Captures one prompt; all its features are in the store when this returns. Any number at a time.

        Raises CaptureItemError when the prompt is to blame, StoreError when the store refused (nothing of the attempt is
        left, so it may be tried again); after anything else the attempt may have left objects and must not be repeated.
        """


def resolve_device(device: str) -> str:
    """`auto` → cuda when there is one, else cpu; anything else is torch's to judge."""
    return ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device


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
    table = _wanted(task, contract)
    for name, (dtype, elements) in table.items():
        tensor = tensors.get(name)
        if tensor is None:
            raise CaptureItemError("SF-CAPTURE-MISSING", f"the engine returned no {name}")
        _check_form(name, dtype_name(tensor.dtype), tuple(tensor.shape), dtype, len(task.input_ids), elements)
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            bad = int((~torch.isfinite(tensor)).sum())
            raise CaptureItemError(
                "SF-CAPTURE-NONFINITE", f"{name} holds {bad} NaN or infinite values of {tensor.numel()}"
            )
    return {name: tensors[name] for name in table}


def check_stored(
    task: PromptTask, contract: CaptureContract, store: str, specs: Sequence[FeatureSpec]
) -> list[FeatureSpec]:
    """The specs in feature-table order, when they are exactly what the task asks for in pool `store`, under its own keys.

    Raises CaptureItemError SF-CAPTURE-MISSING, SF-CAPTURE-KEY or SF-CAPTURE-SHAPE.
    """
    found = {spec.name: spec for spec in specs}
    table = _wanted(task, contract)
    if set(found) != set(table):
        raise CaptureItemError("SF-CAPTURE-MISSING", f"the engine stored {sorted(found)}, not {sorted(table)}")
    for name, (dtype, elements) in table.items():
        spec, key = found[name], feature_key(store, task.attempt, name)
        if spec.key != key:
            raise CaptureItemError("SF-CAPTURE-KEY", f"{name} was stored as {spec.key}, not as {key}")
        _check_form(name, spec.dtype, tuple(spec.shape), dtype, len(task.input_ids), elements)
    return [found[name] for name in table]


def _wanted(task: PromptTask, contract: CaptureContract) -> dict[str, tuple[str, int]]:
    """The rows of the contract's feature table that the task asks for; all when it names none."""
    wanted = set(task.features)
    return {name: row for name, row in feature_table(contract).items() if not wanted or name in wanted}


def _check_form(
    name: str, found_dtype: str, found_shape: tuple[int, ...], dtype: str, tokens: int, elements: int
) -> None:
    shapes = {(tokens,), (tokens, 1)} if elements == 1 else {(tokens, elements)}
    if found_shape not in shapes or found_dtype != dtype:
        raise CaptureItemError(
            "SF-CAPTURE-SHAPE",
            f"{name} is {found_dtype} {list(found_shape)}; {tokens} tokens need {dtype} {list(min(shapes))}",
        )
