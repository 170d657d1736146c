"""The Triton kernels of row-wise losses, run by Triton's interpreter, against the PyTorch reference.

tests/gpu runs them compiled.
"""

import os

import pytest
import torch

from specfleet.trainer.strategies.dspark.head import judge_rows
from specfleet.trainer.strategies.row_ce import row_ce

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="this host compiles its kernels")


@pytest.mark.parametrize("vocabulary", [7, 4096, 9001])
def test_equals_the_reference(vocabulary: int) -> None:
    from specfleet.trainer.kernels.rows import row_gradient_, row_statistics

    generator = torch.Generator().manual_seed(0)
    logits = 20 * torch.randn(5, vocabulary, generator=generator)
    labels = torch.randint(0, vocabulary, (5,), generator=generator)
    labels[0], labels[1] = 0, vocabulary - 1
    weights = torch.tensor([1.0, 0.0, -2.0, 0.5, 3.0])
    # Equal maxima: the first one counts, whatever lane or stretch it is in.
    logits[2, [vocabulary - 1, 3, vocabulary // 2]] = 99.0
    expected = row_ce(logits.double(), labels)
    ce, lse, top, best = row_statistics(logits, labels)
    torch.testing.assert_close(ce, expected.ce_R.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, logits.logsumexp(-1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(top, logits.softmax(-1).amax(-1), rtol=1e-5, atol=1e-5)
    assert torch.equal(best, expected.best_R)
    found = row_gradient_(logits, labels, lse, weights)
    assert found is logits
    torch.testing.assert_close(found, expected.gradient(weights.double()).float(), rtol=1e-4, atol=1e-6)


def test_a_row_that_is_not_finite_says_so() -> None:
    from specfleet.trainer.kernels.rows import row_statistics

    logits = torch.zeros(2, 10)
    logits[1, 4] = torch.nan
    assert row_statistics(logits, torch.tensor([3, 3])).ce_R.isfinite().tolist() == [True, False]


def test_distances_equal_the_reference() -> None:
    from specfleet.trainer.kernels.rows import row_distance_gradient_, row_distances, row_statistics

    generator = torch.Generator().manual_seed(0)
    logits, teacher = (3 * torch.randn(n, 5001, generator=generator) for n in (6, 3))
    teacher_of, weights = torch.tensor([0, 0, 1, 2, 2, 2]), torch.tensor([1.0, 0.0, -2.0, 0.5, 3.0, 1.0])
    labels = torch.randint(0, 5001, (6,), generator=generator)
    rows, expected = judge_rows(logits.double(), teacher.double(), teacher_of, labels, weights.double(), 0.1, 0.9)
    draft, judge = row_statistics(logits, labels), row_statistics(teacher, torch.zeros(3, dtype=torch.int64))
    l1, lean = row_distances(logits, draft.lse_R, teacher, judge.lse_R, teacher_of)
    found = (draft.ce_R, l1, draft.top_R, judge.top_R[teacher_of], draft.best_R, judge.best_R[teacher_of])
    for ours, theirs in zip(found, rows, strict=True):
        torch.testing.assert_close(ours, theirs.to(ours.dtype), rtol=1e-5, atol=1e-5)
    gradient = row_distance_gradient_(
        logits, labels, draft.lse_R, teacher, judge.lse_R, teacher_of, lean, weights, 0.1, 0.9
    )
    assert gradient is logits
    torch.testing.assert_close(gradient, expected.float(), rtol=1e-4, atol=1e-6)


def test_no_rows() -> None:
    from specfleet.trainer.kernels.rows import row_gradient_, row_statistics

    none = torch.zeros(0, dtype=torch.int64)
    found = row_statistics(torch.zeros(0, 9), none)
    assert all(part.shape == (0,) for part in found)
    assert row_gradient_(torch.zeros(0, 9), none, found.lse_R, found.ce_R).shape == (0, 9)
