"""The Triton kernels of block attention, run by Triton's interpreter, against the PyTorch reference.

tests/gpu runs them compiled.
"""

import os

import pytest
import torch
from fixtures.block_attention import Case, random_case, small_case, with_gradients

from specfleet.drafts.block_attention import block_attention

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="this host compiles its kernels")

# Several tiles of rows and of keys; tiles that span sequences; blocks that fill part of a tile, and more than one.
CASES = {
    "small": small_case(),
    "three heads per key head": random_case([70, 1, 90], 25, slots=8, heads=6, kv_heads=2, dim=16, first_anchor=0),
    "head size between powers of two": random_case([140], 9, slots=7, heads=2, kv_heads=1, dim=24),
    "one block larger than a tile": random_case([80, 30], 2, slots=16, heads=9, kv_heads=1, dim=16),
    "wide heads": random_case([40], 5, slots=4, heads=1, kv_heads=1, dim=128),
}


def _check(case: Case, window: int | None) -> None:
    from specfleet.drafts.kernels.block_attention import fused_block_attention

    tensors = case.tensors(torch.float32)
    places = case.anchors_N, case.starts_N
    found = with_gradients(fused_block_attention(*tensors, *places, window), tensors)
    exact = case.tensors(torch.float64)
    for tensor, source in zip(exact, tensors, strict=True):
        tensor.data = source.data.double()
    for ours, theirs in zip(found, with_gradients(block_attention(*exact, *places, window), exact), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [None, 17])
@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference(name: str, window: int | None) -> None:
    _check(CASES[name], window)


def test_without_blocks_context_gets_no_gradient() -> None:
    from specfleet.drafts.kernels.block_attention import fused_block_attention

    case = Case(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), 5, 4, 2, 1, 8)
    tensors = case.tensors(torch.float32)
    out, *grads = with_gradients(fused_block_attention(*tensors, case.anchors_N, case.starts_N), tensors)
    assert out.shape == (0, 4, 2, 8)
    assert all(grad.shape == tensor.shape and not grad.any() for grad, tensor in zip(grads, tensors, strict=True))


def test_blocks_without_context() -> None:
    """Every anchor opens its sequence: only the block itself is seen, and there is not one context row."""
    zeros = torch.zeros(3, dtype=torch.int64)
    _check(Case(zeros, zeros, 0, 4, 2, 1, 8), None)


def test_hidden_keys_do_not_leak() -> None:
    from specfleet.drafts.kernels.block_attention import fused_block_attention

    case, hidden = small_case(), [7, 8, 9, 10, 11, 22, 23]
    tensors = [tensor.detach() for tensor in case.tensors(torch.float32)]
    clean = fused_block_attention(*tensors, case.anchors_N, case.starts_N)
    for index in (1, 2):
        tensors[index][hidden] = 1e30
        tensors[index].requires_grad_()
    found = fused_block_attention(*tensors, case.anchors_N, case.starts_N)
    assert torch.equal(found, clean)
    found.sum().backward()
    assert all(not tensors[index].grad[hidden].any() for index in (1, 2))  # type: ignore[index]
