"""Speculative decoding of an unmodified SGLang 0.5.14 on a CPU: greedy chains, to check a draft where no GPU is.

An entry point of the group `sglang.srt.plugins`; it runs inside the server, and only when SPECFLEET_CPU_SPECULATION is set.
SGLang's triton kernels run in triton's interpreter (TRITON_INTERPRET=1); what exists only as CUDA code is written here:

- building and verifying a chain (a tree with one branch), with the signatures of the sgl_kernel functions;
- calls into torch.cuda that mean nothing without a device;
- DFlash's block embeddings, which SGLang rounds to bfloat16 whatever the model's dtype is.

A token takes about a second. Nothing of this is used on a GPU.
"""

import os
import sys
from typing import Any

import torch

from specfleet.contracts.errors import EXIT_ENVIRONMENT
from specfleet.sglang import CPU_SPECULATION, CPU_SPECULATION_RELEASE


def activate() -> None:
    """Called by SGLang in its first process and in each scheduler. SGLang only logs exceptions; SystemExit ends the process."""
    if not os.environ.get(CPU_SPECULATION):
        return
    import sglang

    if sglang.__version__ != CPU_SPECULATION_RELEASE:
        print(
            f"specfleet: [SF-SGLANG-VERSION] speculation on a CPU is written for SGLang {CPU_SPECULATION_RELEASE}, this is "
            f"{sglang.__version__}. Use a GPU, or install {CPU_SPECULATION_RELEASE}",
            file=sys.stderr,
            flush=True,
        )
        raise SystemExit(EXIT_ENVIRONMENT)
    _install()


def _install() -> None:
    import sglang.srt.speculative.eagle_utils as eagle_utils
    import sglang.srt.speculative.triton_ops.cache_locs as cache_locs
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    nothing: Any = lambda *args, **kwargs: None  # noqa: E731
    torch.cuda.synchronize = nothing
    torch.cuda.empty_cache = nothing
    torch.Tensor.record_stream = nothing  # type: ignore[method-assign]
    # Chooses the triton kernel, which the interpreter runs.
    cache_locs._is_cuda = True
    # On CUDA this name is imported from sgl_kernel; on a CPU it does not exist.
    eagle_utils.sgl_build_tree_kernel_efficient = build_chain
    HookRegistry.register(f"{eagle_utils.__name__}.verify_tree_greedy_func", verify_chain, HookType.REPLACE)
    HookRegistry.register(
        "sglang.srt.model_executor.model_runner.ModelRunner._extend_forward_kwargs", keep_dtype, HookType.AFTER
    )


def build_chain(
    parent_list: torch.Tensor,
    selected_index: torch.Tensor,
    verified_lengths_B: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index_BN: torch.Tensor,
    retrieve_next_token_BN: torch.Tensor,
    retrieve_next_sibling_BN: torch.Tensor,
    topk: int,
    depth: int,
    num_tokens: int,
    mask_mode: int,
) -> None:
    """Fills masks, positions and links of N = num_tokens rows a sequence: the anchor and its guesses, each after the other.

    mask_mode 0: per sequence [N, length + N] one after another, text before the anchor included; otherwise [B, N, N].
    """
    assert topk == 1, f"a chain has one branch, not {topk}"
    rows = torch.arange(num_tokens)
    causal_NN = torch.ones(num_tokens, num_tokens, dtype=torch.bool).tril()
    batch = verified_lengths_B.numel()
    positions.view(-1)[: batch * num_tokens] = (verified_lengths_B[:, None] + rows).flatten()
    retrieve_index_BN.copy_(torch.arange(batch)[:, None] * num_tokens + rows)
    retrieve_next_token_BN.copy_(torch.where(rows < num_tokens - 1, rows + 1, -1))
    retrieve_next_sibling_BN.fill_(-1)
    text_lengths = verified_lengths_B.tolist() if int(mask_mode) == 0 else [0] * batch
    parts = [
        torch.cat([torch.ones(num_tokens, length, dtype=torch.bool), causal_NN], dim=1).flatten()
        for length in text_lengths
    ]
    mask = torch.cat(parts)
    tree_mask[: len(mask)] = mask


def verify_chain(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
    topk: int = 1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Greedy acceptance, in place: guesses count while they equal what the target says after the token before them.

    candidates, target_predict, retrieve_index: [B, N]. predicts [B·N]: the target's token behind each accepted row.
    accept_index [B, N]: those rows, −1 behind them. accept_token_num [B]: accepted guesses, without the target's own token.
    """
    right = candidates[:, 1:] == target_predict[:, :-1]
    accepted_B = right.long().cumprod(dim=1).sum(dim=1)
    accept_token_num.copy_(accepted_B)
    taken = torch.arange(candidates.shape[1]) <= accepted_B[:, None]
    accept_index.copy_(torch.where(taken, retrieve_index, -1)[:, : accept_index.shape[1]])
    predicts[retrieve_index[taken]] = target_predict[taken].to(predicts.dtype)
    return predicts, accept_index, accept_token_num


def keep_dtype(kwargs: dict[str, Any], runner: Any, forward_batch: Any, *args: Any, **named: Any) -> dict[str, Any]:
    """After SGLang made the arguments of a forward: given embeddings in the dtype they came in."""
    if "input_embeds" in kwargs:
        kwargs["input_embeds"] = forward_batch.input_embeds
    return kwargs
