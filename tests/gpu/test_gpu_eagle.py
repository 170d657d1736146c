"""A step of the EAGLE family on a GPU has the CPU's gradient: kernels, row gathers, chunks and all."""

from typing import Any

import pytest
import torch
from fixtures.eagle3 import random_samples, tiny_draft, tiny_strategy
from fixtures.objective import gradient
from fixtures.peagle import tiny_peagle, tiny_peagle_strategy

from specfleet.trainer.strategies.base import Strategy

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

# Changes of the draft, and of the section.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "eagle3": ({}, {}),
    "eagle3.1": ({"fc_norm": True, "norm_output": True}, {"fc_norm": True, "norm_output": True}),
    "eagle3, lk": ({}, {"lk": "lambda"}),
    "peagle": ({}, {}),
}


def _step(name: str, device: str, dtype: torch.dtype) -> torch.Tensor:
    """Loss and gradient of one step, in one row."""
    generator = torch.Generator().manual_seed(11)
    embedding, head = (torch.randn(384, 32, generator=generator, dtype=torch.float64).to(device) for _ in range(2))
    draft_changes, section = CASES[name]
    strategy: Strategy
    if name == "peagle":
        strategy = tiny_peagle_strategy(tiny_peagle(dtype=dtype, **draft_changes).to(device), head, **section)
    else:
        strategy = tiny_strategy(tiny_draft(dtype=dtype, **draft_changes).to(device), embedding, head, **section)
    samples = random_samples([21, 13, 2, 17], dtype=dtype)
    for index, sample in enumerate(samples):
        sample["visit"] = torch.tensor([0, index])
    loss, grads = gradient(strategy, [samples[:3], samples[3:]])
    return torch.cat([torch.tensor([loss]).double(), *(grad.flatten().double().cpu() for grad in grads.values())])


@pytest.mark.parametrize("name", CASES)
# In bf16 these random weights are 0.11 off on a CPU too.
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.2)])
def test_a_step_has_the_cpus_gradient(name: str, dtype: torch.dtype, tolerance: float) -> None:
    exact = _step(name, "cpu", torch.float64)
    found = _step(name, "cuda", dtype)
    assert float((found - exact).norm()) < tolerance * float(exact.norm())
