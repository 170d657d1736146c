"""The Triton kernels of row-wise cross entropy, run by Triton's interpreter, against the PyTorch reference.

tests/gpu runs them compiled.
"""

import os

import pytest
import torch

from specfleet.trainer.strategies.row_ce import row_ce

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="this host compiles its kernels")


@pytest.mark.parametrize("vocabulary", [7, 4096, 9001])
def test_equals_the_reference(vocabulary: int) -> None:
    from specfleet.trainer.kernels.row_ce import row_gradient_, row_statistics

    generator = torch.Generator().manual_seed(0)
    logits = 20 * torch.randn(5, vocabulary, generator=generator)
    labels = torch.randint(0, vocabulary, (5,), generator=generator)
    labels[0], labels[1] = 0, vocabulary - 1
    weights = torch.tensor([1.0, 0.0, -2.0, 0.5, 3.0])
    # Equal maxima: the first one counts, whatever lane or stretch it is in.
    logits[2, [vocabulary - 1, 3, vocabulary // 2]] = 99.0
    expected = row_ce(logits.double(), labels)
    ce, lse, best = row_statistics(logits, labels)
    torch.testing.assert_close(ce, expected.ce_R.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, logits.logsumexp(-1), rtol=1e-5, atol=1e-5)
    assert torch.equal(best, expected.best_R)
    found = row_gradient_(logits, labels, lse, weights)
    assert found is logits
    torch.testing.assert_close(found, expected.gradient(weights.double()).float(), rtol=1e-4, atol=1e-6)


def test_a_row_that_is_not_finite_says_so() -> None:
    from specfleet.trainer.kernels.row_ce import row_statistics

    logits = torch.zeros(2, 10)
    logits[1, 4] = torch.nan
    ce, _, _ = row_statistics(logits, torch.tensor([3, 3]))
    assert ce.isfinite().tolist() == [True, False]


def test_no_rows() -> None:
    from specfleet.trainer.kernels.row_ce import row_gradient_, row_statistics

    none = torch.zeros(0, dtype=torch.int64)
    ce, lse, best = row_statistics(torch.zeros(0, 9), none)
    assert ce.shape == lse.shape == best.shape == (0,)
    assert row_gradient_(torch.zeros(0, 9), none, lse, lse).shape == (0, 9)
