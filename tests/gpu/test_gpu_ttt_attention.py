"""Rollout attention on CUDA kernels equals the CPU's, gradients included."""

import pytest
import torch

from specfleet.drafts.ttt_attention import ttt_attention

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def _inputs(length: int, head_dim: int, steps: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    rows = torch.cat([torch.arange(length // 3, length - 9), length + torch.arange(5, length - 30)])
    shapes = [(len(rows), 6, head_dim), (2, 6, length, head_dim), (2, 6, length, head_dim)]
    shapes += [(len(rows), 3, head_dim)] * (2 * steps)
    return rows, [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def _run(
    rows: torch.Tensor, inputs: list[torch.Tensor], steps: int, device: str, dtype: torch.dtype
) -> list[torch.Tensor]:
    """Output and the gradient of every input."""
    q, k, v, *own = leaves = [x.to(device, dtype).requires_grad_() for x in inputs]
    made = torch.stack(own).unflatten(0, (2, steps)) if steps else None
    out = ttt_attention(q, k, v, rows.to(device), made)
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape).to(device, dtype)
    return [x.detach().double().cpu() for x in (out, *torch.autograd.grad((out * weights).sum(), leaves))]


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 3e-2), (torch.float32, 5e-3)])
def test_cuda_equals_cpu(dtype: torch.dtype, tolerance: float, head_dim: int, steps: int) -> None:
    """150 rows: not a multiple of any kernel's block. fp32 may use TF32 inside the kernel, hence its tolerance."""
    rows, inputs = _inputs(150, head_dim, steps)
    expected = _run(rows, inputs, steps, "cpu", torch.float64)
    for got, exact in zip(_run(rows, inputs, steps, "cuda", dtype), expected, strict=True):
        assert float((got - exact).norm() / exact.norm()) < tolerance
