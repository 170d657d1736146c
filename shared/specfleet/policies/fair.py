"""Weighted fair sharing of one capture pool between runs."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Share:
    run: int
    """Runs are numbered in the order they were submitted; ties go to the older one."""
    held: int
    """Samples the run has dispatched or captured and not yet trained."""
    weight: float = 1.0


def fair_order(shares: Iterable[Share]) -> list[int]:
    """Runs in the order they should be offered the next credits: the least served per weight first."""
    return [share.run for share in sorted(shares, key=lambda share: (share.held / share.weight, share.run))]
