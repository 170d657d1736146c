"""The features all cases share, as two feature sets: captured once, with the union of the layers that the cases ask for."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from benchmarks.strategies.cases import CASES, configure
from specfleet.contracts.capture import contract_hash
from specfleet.contracts.errors import CaptureItemError
from specfleet.data.prompt_set import PromptSet
from specfleet.features.feature_set import FeatureSet
from specfleet.features.source import features_url
from specfleet.features.writer import FeatureSetWriter
from specfleet.target.facts import build_contract, read_target_facts
from specfleet.target.hf import HFTarget
from specfleet.wire.records_pb2 import CaptureContract


def union_contract(target: Path, batch_size: int) -> CaptureContract:
    facts = read_target_facts(target)
    layers = {layer for name in CASES for layer in build_contract(configure(name, target, batch_size), facts).layers}
    return build_contract(configure("eagle3", target, batch_size, tuple(sorted(layers))), facts)


class Recorder:
    """Captures what is not recorded yet; the target is loaded only when something is missing."""

    def __init__(self, contract: CaptureContract, device: str, batch_tokens: int) -> None:
        self._contract, self._device, self._batch_tokens = contract, device, batch_tokens
        self._target: HFTarget | None = None
        self.tokens, self.seconds = 0, 0.0
        """What was captured, and the time it took without loading the target."""

    def record(self, root: Path, prompts: PromptSet, wanted: Sequence[int]) -> str:
        """URL of a feature set under `root` that holds the wanted prompts."""
        directory = root / f"{prompts.digest[:16]}-{contract_hash(self._contract)[:16]}"
        # Never finished: a later comparison may want more of the same prompts.
        writer = FeatureSetWriter.open(directory, self._contract, prompts)
        missing = [index for index in wanted if index not in writer.recorded]
        target = self._load() if missing else None
        began = time.monotonic()
        for batch in self._batches(prompts, missing):
            self._capture(writer, prompts, batch, target)
        writer.flush()
        writer.close()
        self.seconds += time.monotonic() - began
        self.tokens += sum(prompts.num_tokens_of(index) for index in missing)
        return features_url(FeatureSet.open(directory))

    def _load(self) -> HFTarget:
        if self._target is None:
            contract = self._contract
            self._target = HFTarget.load(
                contract.target, contract.layers, contract.dtype, self._device, contract.final_state, contract.extras
            )
        return self._target

    def _capture(
        self, writer: FeatureSetWriter, prompts: PromptSet, batch: Sequence[int], target: HFTarget | None
    ) -> None:
        assert target is not None
        rows = prompts.read(batch)
        for row, item in zip(rows, target.capture([row.input_ids for row in rows]), strict=True):
            if isinstance(item, CaptureItemError):
                raise item
            ids = torch.tensor(row.input_ids, dtype=torch.int32)
            mask = torch.frombuffer(bytearray(row.loss_mask), dtype=torch.uint8)
            writer.add(row.index, {"input_ids": ids, "loss_mask": mask, **item})

    def _batches(self, prompts: PromptSet, indices: Sequence[int]) -> Iterator[list[int]]:
        """Rows of similar length together, at most batch_tokens with padding (at least one row)."""
        batch: list[int] = []
        for index in sorted(indices, key=prompts.num_tokens_of):
            if batch and (len(batch) + 1) * prompts.num_tokens_of(index) > self._batch_tokens:
                yield batch
                batch = []
            batch.append(index)
        if batch:
            yield batch
