"""The Triton kernels of the losses against a soft teacher, run by Triton's interpreter, against the PyTorch reference.

tests/gpu runs them compiled.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fixtures.soft_rows import HeadCase, run_head

from specfleet.trainer.strategies import soft_ce
from specfleet.trainer.strategies.soft_ce import Lk

pytestmark = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="this host compiles its kernels"),
    # The interpreter's numpy says so of the dead row.
    pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning"),
]


@pytest.mark.parametrize("vocabulary", [7, 2048, 2500])
@pytest.mark.parametrize("lk", [Lk(), Lk("alpha"), Lk("lambda"), Lk("lambda", per_token=False)], ids=str)
def test_equals_the_reference(lk: Lk, vocabulary: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = HeadCase(vocabulary)
    expected = run_head(case, torch.float64, lk)
    monkeypatch.setattr(soft_ce, "_fused", lambda logits: True)
    for got, exact in zip(run_head(case, torch.float32, lk), expected, strict=True):
        torch.testing.assert_close(got.double(), exact.double(), rtol=2e-4, atol=1e-5)


def test_a_teacher_without_its_mass(monkeypatch: pytest.MonkeyPatch) -> None:
    case = HeadCase(100, mass=False)
    expected = run_head(case, torch.float64, Lk())
    monkeypatch.setattr(soft_ce, "_fused", lambda logits: True)
    for got, exact in zip(run_head(case, torch.float32, Lk()), expected, strict=True):
        torch.testing.assert_close(got.double(), exact.double(), rtol=2e-4, atol=1e-5)


def test_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soft_ce, "_fused", lambda logits: True)
    loss, best, alpha, by_x, by_weight = run_head(HeadCase(9, rows=0), torch.float32, Lk())
    assert (loss.item(), best.shape, alpha.shape, by_x.shape) == (0.0, (0,), (0,), (0, 6))
    assert torch.equal(by_weight, torch.zeros(9, 6))


def test_compiles_without_a_gpu(tmp_path: Path) -> None:
    """The interpreter accepts more than the compiler, and the compiler needs no device."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).parents[1] / "fixtures" / "compile_soft_rows.py"
    done = subprocess.run(
        [sys.executable, script], env={**environment, "TRITON_CACHE_DIR": str(tmp_path)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
