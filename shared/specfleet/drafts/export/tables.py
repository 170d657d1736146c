"""What an engine's loader expects of an export: a table of tensors, derived from config.json the way the engine does it.

Engines skip names they do not know and keep random weights for names they miss, both silently. So the exporter and the
importer compare name by name and shape by shape, and refuse on any difference.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from specfleet.contracts.errors import ExportError


@dataclass(frozen=True)
class Expected:
    """One tensor of a loader table. dtype None: any floating dtype."""

    shape: tuple[int, ...]
    required: bool = True
    dtype: torch.dtype | None = None


Table = dict[str, Expected]


def check_against_table(tensors: Mapping[str, torch.Tensor], table: Table, where: str) -> None:
    """Raises ExportError SF-EXPORT-TENSORS that lists every leftover, missing, misshapen or mistyped tensor."""
    problems = [f"leftover {name} {list(tensors[name].shape)}" for name in sorted(tensors.keys() - table.keys())]
    for name, expected in table.items():
        tensor = tensors.get(name)
        if tensor is None:
            if expected.required:
                problems.append(f"missing {name} {list(expected.shape)}")
        elif tuple(tensor.shape) != expected.shape:
            problems.append(f"misshapen {name}: {list(tensor.shape)}, expected {list(expected.shape)}")
        elif expected.dtype is not None and tensor.dtype != expected.dtype:
            problems.append(f"mistyped {name}: {tensor.dtype}, expected {expected.dtype}")
        elif expected.dtype is None and not tensor.dtype.is_floating_point:
            problems.append(f"mistyped {name}: {tensor.dtype}, expected a floating dtype")
    if problems:
        raise ExportError(
            "SF-EXPORT-TENSORS",
            f"{where} does not match the engine's loader table ({len(problems)} differences): {'; '.join(problems)}",
        )
