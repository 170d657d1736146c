"""What the machine can do at most: each step of a capture alone, in this process, with nothing else running."""

import time
from collections.abc import Callable, Mapping

import torch

from specfleet.contracts.capture import feature_table
from specfleet.contracts.errors import StoreError
from specfleet.contracts.ids import task_key
from specfleet.store.base import FeatureStore
from specfleet.store.tensors import byte_view, checksum
from specfleet.target.dtypes import DTYPES
from specfleet.wire.records_pb2 import CaptureContract, SampleRef, TaskAttempt

REPEATS = 3
# Large enough that fixed costs vanish.
COPY_BYTES = {"cuda": 1 << 30, "cpu": 64 << 20}
OBJECT_BYTES, OBJECTS = 4 << 20, 8
SAMPLES, SAMPLE_TOKENS = 32, 512
_DTYPES = {**DTYPES, "int32": torch.int32, "uint8": torch.uint8}


def measure(device: str, store: FeatureStore, contract: CaptureContract) -> dict[str, float]:
    """GB/s of the best of a few tries, and samples per second."""
    found = {}
    size = COPY_BYTES[device]
    block = torch.zeros(size, dtype=torch.uint8)
    if device == "cuda":
        source = torch.zeros(size, dtype=torch.uint8, device="cuda")
        pinned = torch.zeros(size, dtype=torch.uint8, pin_memory=True)
        found["d2h_pinned_gb_s"] = _rate(size, lambda: _to_host(pinned, source))
        found["d2h_pageable_gb_s"] = _rate(size, lambda: _to_host(block, source))
        del source, pinned
    view = byte_view("block", block)
    found["hash_one_thread_gb_s"] = _rate(size, lambda: checksum(view))
    found["put_gb_s"] = _puts(store, {f"object{index}": (OBJECT_BYTES, "uint8") for index in range(OBJECTS)}, 1)[0]
    shapes = {name: (SAMPLE_TOKENS * elements, dtype) for name, (dtype, elements) in feature_table(contract).items()}
    found[f"put_{SAMPLE_TOKENS}_token_samples_gb_s"], samples_per_s = _puts(store, shapes, SAMPLES)
    return {
        **{name: round(value, 2) for name, value in found.items()},
        f"put_{SAMPLE_TOKENS}_token_samples_per_s": round(samples_per_s),
    }


def _to_host(to: torch.Tensor, source: torch.Tensor) -> None:
    to.copy_(source, non_blocking=True)
    torch.cuda.synchronize()


def _rate(num_bytes: int, call: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(REPEATS):
        began = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - began)
    return num_bytes / best / 1e9


def _puts(store: FeatureStore, shapes: Mapping[str, tuple[int, str]], samples: int) -> tuple[float, float]:
    """GB/s and samples per second of one put of equal samples, from memory that the store lends; checksums included."""
    tensors = {name: store.empty((elements,), _DTYPES[dtype]).zero_() for name, (elements, dtype) in shapes.items()}
    size = samples * sum(tensor.nbytes for tensor in tensors.values())
    best_s = float("inf")
    for repeat in range(REPEATS):
        attempts = [TaskAttempt(task=task_key("limits", 0, number), attempt=1 + repeat) for number in range(samples)]
        began = time.perf_counter()
        outcomes = store.put_many([(attempt, tensors) for attempt in attempts])
        best_s = min(best_s, time.perf_counter() - began)
        for attempt, outcome in zip(attempts, outcomes, strict=True):
            if isinstance(outcome, StoreError):
                raise outcome
            store.release(SampleRef(attempt=attempt, store=store.name, features=outcome))
    return size / best_s / 1e9, samples / best_s
