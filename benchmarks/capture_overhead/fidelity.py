"""Samples that were captured under load, read back from the pool and compared with transformers."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from specfleet.target.hf import HFTarget
from specfleet.wire.records_pb2 import CaptureContract

Tensors = dict[str, torch.Tensor]
# Rows of the head computed at once.
HEAD_ROWS = 512


def compare(contract: CaptureContract, device: str, samples: Sequence[tuple[list[int], Tensors]]) -> Any:
    """samples: the ids that were sent, and what the pool held of them.

    How far, per feature, captured states are from transformers' in the contract's dtype; for comparison, how far those are
    from transformers' in float32, which is the noise of that dtype, and captured ones from float32.
    """
    prompts, captured = [ids for ids, _ in samples], [tensors for _, tensors in samples]
    for ids, tensors in samples:
        assert tensors["input_ids"].tolist() == ids, "the pool holds other token ids than were sent"
    expected, head_VH = _forward(contract, contract.dtype, device, prompts)
    result: dict[str, Any] = {
        "samples": len(prompts),
        "tokens": sum(map(len, prompts)),
        "captured_vs_transformers": _difference(contract, captured, expected, head_VH),
    }
    if contract.dtype != "float32":
        exact, exact_head_VH = _forward(contract, "float32", device, prompts)
        result["transformers_vs_float32"] = _difference(contract, expected, exact, exact_head_VH)
        result["captured_vs_float32"] = _difference(contract, captured, exact, exact_head_VH)
    return result


def _forward(
    contract: CaptureContract, dtype: str, device: str, prompts: Sequence[list[int]]
) -> tuple[list[Tensors], torch.Tensor]:
    target = HFTarget.load(Path(contract.target), list(contract.layers), dtype, device)
    found = []
    for ids in prompts:
        (item,) = target.capture([ids])
        if isinstance(item, Exception):
            raise item
        found.append(item)
    return found, target.head_VH.detach()


def _difference(
    contract: CaptureContract, ours: Sequence[Tensors], theirs: Sequence[Tensors], head_VH: torch.Tensor
) -> Any:
    """‖a − b‖ / ‖b‖ of each token's state, over all tokens; and how often the head's first choice is the same."""
    width = contract.hidden_size
    parts: dict[str, Callable[[Tensors], torch.Tensor]] = {
        f"layer {layer}": lambda item, at=index * width: item["aux_states"][:, at : at + width]  # type: ignore[misc]
        for index, layer in enumerate(contract.layers)
    }
    parts["final_state"] = lambda item: item["final_state"]
    told: dict[str, Any] = {}
    for name, part in parts.items():
        a, b = (torch.cat([part(item) for item in items]).double() for items in (ours, theirs))
        relative = (a - b).norm(dim=1) / b.norm(dim=1)
        told[name] = {"mean": float(f"{relative.mean():.4g}"), "max": float(f"{relative.max():.4g}")}
    same = total = 0
    for mine, other in zip(ours, theirs, strict=True):
        agreed = _choices(mine["final_state"], head_VH) == _choices(other["final_state"], head_VH)
        same, total = same + int(agreed.sum()), total + len(agreed)
    told["argmax_agreement"] = math.floor(same / total * 1e5) / 1e5
    return told


def _choices(final_TH: torch.Tensor, head_VH: torch.Tensor) -> torch.Tensor:
    rows = final_TH.to(head_VH.device, head_VH.dtype).split(HEAD_ROWS)
    return torch.cat([(part @ head_VH.T).argmax(-1) for part in rows])
