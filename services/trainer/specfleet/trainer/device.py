"""Which device a rank computes on."""

import torch

from specfleet.contracts.errors import HostError

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def pick_device(wanted: str, local_rank: int) -> torch.device:
    """`auto`: CUDA when there is any, else the CPU. Raises HostError SF-HOST-NO-CUDA when this rank has no device."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cpu" or (wanted == "auto" and count == 0):
        return torch.device("cpu")
    if local_rank >= count:
        raise HostError(
            "SF-HOST-NO-CUDA",
            f"local rank {local_rank} needs CUDA device {local_rank}, but {count} are visible; "
            "lower --slots, or use --device cpu",
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device
