"""Which dtype arithmetic runs in, as opposed to the dtype features are stored in."""

import torch

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def compute_dtype(dtype: torch.dtype, device: str | torch.device) -> torch.dtype:
    """The dtype to compute in when `dtype` is asked for.

    A CPU without bfloat16 instructions emulates a 16-bit GEMM several times slower than it runs a float32 one (8× on an
    AVX2 machine), so there the arithmetic is float32 and only results are rounded to `dtype`.
    """
    if (
        torch.device(device).type == "cpu"
        and dtype != torch.float32
        and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    ):
        return torch.float32
    return dtype
