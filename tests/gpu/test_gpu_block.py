"""The kernels block drafts run on CUDA against the CPU's. Skipped without a GPU."""

import pytest
import torch

from specfleet.drafts.block_attention import block_attention, plan_spans
from specfleet.trainer.strategies.hard_ce import hard_ce_head

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def _attention(device: str, dtype: torch.dtype, window: int | None, span_blocks: int) -> list[torch.Tensor]:
    """Output and gradients, in fp64 on the CPU. Two sequences of 150 and 97 context rows, anchors from 0 on."""
    generator = torch.Generator().manual_seed(0)
    counts, starts = torch.tensor([40, 25]), torch.tensor([0, 150])
    anchors = torch.cat([torch.randperm(n, generator=generator)[:c].sort().values for n, c in ((150, 40), (97, 25))])
    anchors[0] = 0
    shapes = [(65, 7, 8, 64), (247, 2, 64), (247, 2, 64), (65, 7, 2, 64), (65, 7, 2, 64)]
    tensors = [
        torch.randn(shape, generator=generator).to(torch.bfloat16).to(device, dtype).requires_grad_()
        for shape in shapes
    ]
    spans = plan_spans(anchors, counts, starts, span_blocks)
    out = block_attention(*tensors, anchors.to(device), spans, window)
    weights = torch.randn(out.shape, generator=generator).to(device, dtype)
    grads = torch.autograd.grad((out * weights).sum(), tensors)
    return [x.detach().cpu().double() for x in (out, *grads)]


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("span_blocks", [1, 32])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-4), (torch.bfloat16, 3e-2)])
def test_attention_equals_the_cpus(window: int | None, span_blocks: int, dtype: torch.dtype, tolerance: float) -> None:
    expected = _attention("cpu", torch.float64, window, 32)
    for ours, theirs in zip(_attention("cuda", dtype, window, span_blocks), expected, strict=True):
        assert float((ours - theirs).norm() / theirs.norm()) < tolerance


def test_cross_entropy_equals_the_cpus() -> None:
    generator = torch.Generator().manual_seed(0)
    x, head = (torch.randn(n, 64, generator=generator).to(torch.bfloat16) for n in (100, 1000))
    labels, weights = torch.randint(0, 1000, (100,), generator=generator), torch.rand(100, generator=generator)
    results = []
    for device, dtype in (("cpu", torch.float64), ("cuda", torch.bfloat16)):
        rows = x.to(device, dtype).requires_grad_()
        loss, _, _ = hard_ce_head(rows, head.to(device, dtype), labels.to(device), weights.to(device), [0, 37, 100])
        results.append((float(loss.detach()), torch.autograd.grad(loss, rows)[0].cpu().double()))
    assert results[1][0] == pytest.approx(results[0][0], rel=1e-2)
    assert float((results[1][1] - results[0][1]).norm() / results[0][1].norm()) < 2e-2
