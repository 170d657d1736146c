"""AdamW over fp32 master copies, a global L2 clip and a closed-form learning rate."""

import math
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from specfleet.contracts.errors import ContractError
from specfleet.trainer.parallel import Ranks

_EPS = 1e-8
_CLIP_EPS = 1e-6


def learning_rate(k: int, *, peak: float, total: int, warmup_ratio: float, schedule: str = "cosine") -> float:
    """The rate of the k-th optimizer step (0-based). With W = int(warmup_ratio · total):

    k < W: peak·(k+1)/W. After that constant, or ½·peak·(1 + cos(π·(k−W)/(total−W))), which ends at 0 and stays there.
    Closed form, so that a resumed run has exactly the rates of an uninterrupted one.
    """
    warmup = int(warmup_ratio * total)
    if k < warmup:
        return peak * (k + 1) / warmup
    if schedule == "constant":
        return peak
    progress = min(1.0, (k - warmup) / max(1, total - warmup))
    return 0.5 * peak * (1.0 + math.cos(math.pi * progress))


class MasterAdamW:
    """AdamW whose weights, gradients and moments are fp32 and live in flat buffers.

    Parameters may be bf16: gradients are added up in fp32 over micro-batches (`collect`), summed over ranks, clipped,
    and the updated masters are rounded back into the parameters (`step`). Weight decay applies to all of them.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        max_grad_norm: float = 1.0,
    ) -> None:
        trainable = [(name, parameter) for name, parameter in named_parameters if parameter.requires_grad]
        self.names = [name for name, _ in trainable]
        self.parameters = [parameter for _, parameter in trainable]
        self.max_grad_norm = max_grad_norm
        self._master = nn.Parameter(torch.cat([p.detach().reshape(-1).float() for p in self.parameters]))
        self._grad = torch.zeros_like(self._master)
        self._master.grad = self._grad
        # One flat parameter: the update is elementwise, so this equals one optimizer entry per parameter.
        self._adamw = torch.optim.AdamW([self._master], betas=betas, eps=_EPS, weight_decay=weight_decay, fused=True)
        self._adamw.state[self._master] = {
            "step": torch.zeros((), dtype=torch.float32, device=self._master.device),
            "exp_avg": torch.zeros_like(self._master, requires_grad=False),
            "exp_avg_sq": torch.zeros_like(self._master, requires_grad=False),
        }
        self._grad_views, self._master_views = self._views(self._grad), self._views(self._master.detach())

    @torch.no_grad()
    def collect(self) -> None:
        """Adds the parameters' gradients of one micro-batch to the fp32 sum and drops them. None counts as zero."""
        found = [
            (sum_, p.grad) for sum_, p in zip(self._grad_views, self.parameters, strict=True) if p.grad is not None
        ]
        if found:
            sums, grads = zip(*found, strict=True)
            torch._foreach_add_(sums, grads)
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self, lr: float, ranks: Ranks) -> torch.Tensor:
        """Sums gradients over ranks, clips by c/(‖g‖+1e-6), updates. Returns ‖g‖ before clipping (a scalar on the device).

        A norm that is not finite leaves weights and moments as they are; the caller sees the norm and reports it. Nothing
        here waits for the device.
        """
        ranks.sum_(self._grad)
        norm = torch.linalg.vector_norm(self._grad)
        self._grad.mul_((self.max_grad_norm / (norm.double() + _CLIP_EPS)).clamp(max=1.0))
        # The protocol of torch's gradient scaler: the fused kernel updates nothing where found_inf is 1.
        self._adamw.found_inf = (~torch.isfinite(norm)).float()  # type: ignore[attr-defined]
        self._adamw.param_groups[0]["lr"] = lr
        self._adamw.step()
        self._write_back()
        self._grad.zero_()
        return norm

    def state(self) -> dict[str, torch.Tensor]:
        """`master.NAME`, `exp_avg.NAME`, `exp_avg_sq.NAME` (fp32, the parameter's shape), `step`. Views, no copies."""
        entries = {"step": self._adamw.state[self._master]["step"]}
        for kind, flat in self._flats().items():
            for name, view in zip(self.names, self._views(flat), strict=True):
                entries[f"{kind}.{name}"] = view
        return entries

    @torch.no_grad()
    def load(self, entries: Mapping[str, torch.Tensor]) -> None:
        """Inverse of state; also writes the parameters. Raises ContractError SF-CHECKPOINT-OPTIMIZER."""
        own = self.state()
        wrong = [name for name in own if name not in entries or entries[name].shape != own[name].shape]
        extra = sorted(set(entries) - set(own))
        if wrong or extra:
            raise ContractError(
                "SF-CHECKPOINT-OPTIMIZER",
                f"optimizer state does not fit the draft: missing or misshapen {wrong[:5]} ({len(wrong)} in all), "
                f"unknown {extra[:5]} ({len(extra)} in all)",
            )
        for name, tensor in own.items():
            tensor.copy_(entries[name])
        self._write_back()

    def _flats(self) -> dict[str, torch.Tensor]:
        moments = self._adamw.state[self._master]
        return {"master": self._master.detach(), "exp_avg": moments["exp_avg"], "exp_avg_sq": moments["exp_avg_sq"]}

    def _write_back(self) -> None:
        torch._foreach_copy_(tuple(self.parameters), self._master_views)

    def _views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        pieces = flat.split([parameter.numel() for parameter in self.parameters])
        return [piece.view(parameter.shape) for piece, parameter in zip(pieces, self.parameters, strict=True)]
