"""The losses against a soft teacher on a GPU equal the CPU's, gradients included."""

import pytest
import torch
from fixtures.soft_rows import HeadCase, run_head

from specfleet.trainer.strategies.soft_ce import Lk

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("mass", [True, False])
@pytest.mark.parametrize("lk", [Lk(), Lk("alpha"), Lk("lambda")], ids=str)
# In bf16 what rounding the inputs alone does to α's gradient: 3.5 % on the CPU, too.
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.05)])
def test_cuda_equals_cpu(dtype: torch.dtype, tolerance: float, lk: Lk, mass: bool) -> None:
    if lk.kind != "none" and not mass:
        pytest.skip("an LK loss needs the teacher's mass")
    case = HeadCase(16411, rows=200, mass=mass)
    expected = run_head(case, torch.float64, lk)
    found = run_head(case, dtype, lk, "cuda", chunk_rows=70)
    if dtype == torch.float32:
        assert torch.equal(found[1], expected[1])
    for got, exact in zip((found[0], *found[2:]), (expected[0], *expected[2:]), strict=True):
        assert float((got.double() - exact).norm()) < tolerance * float(exact.norm())
