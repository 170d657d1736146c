"""Engines that run the target. Two of them give the same tensors within tolerance (docs/design.md §4)."""
