"""What strategies of block drafts set up alike: sizes, mask token, the frozen embedding and head, how batches are drawn."""

from pathlib import Path
from typing import Any, TypeVar

import torch

from specfleet.config.strategies import DFlashSection, DominoSection, DSparkSection
from specfleet.drafts.block import BlockConfig, BlockDraft
from specfleet.drafts.sizes import decoder_sizes
from specfleet.drafts.warm_start import stated_mask_token, warm_start
from specfleet.target.dtypes import compute_dtype
from specfleet.target.mask_token import resolve_mask_token
from specfleet.target.weights import load_embedding, load_raw_head, read_text_config
from specfleet.trainer.strategies.base import Prepared, Strategy
from specfleet.trainer.strategies.block_batch import ON_HOST, BlockPlan
from specfleet.wire.records_pb2 import CaptureContract

BlockSection = DFlashSection | DominoSection | DSparkSection
DraftT = TypeVar("DraftT", bound=BlockDraft)


def backbone_config(
    section: BlockSection, contract: CaptureContract, target_dir: Path, *, sample_from_anchor: bool
) -> dict[str, Any]:
    """The keys of `BlockConfig` for a target.

    With a sliding window every layer slides but the last, which keeps sight of the whole context; a single layer slides.
    Raises ConfigError SF-CONFIG-MASK-TOKEN.
    """
    count = section.num_layers
    sliding = max(count - 1, 1) if section.sliding_window else 0
    return {
        **decoder_sizes(read_text_config(target_dir), section.intermediate_size),
        "vocab_size": contract.vocab_size,
        "num_layers": count,
        "block_size": section.block_size,
        "layer_ids": list(contract.layers),
        "mask_token_id": resolve_mask_token(target_dir, section.mask_token_id, stated_mask_token(section.init_from)),
        "num_target_layers": contract.num_hidden_layers,
        "layer_types": (["sliding_attention"] * sliding + ["full_attention"] * (count - sliding)) if sliding else [],
        "sliding_window": section.sliding_window,
        "sample_from_anchor": sample_from_anchor,
    }


def block_plan(section: BlockSection, config: BlockConfig, seed: int, device: torch.device) -> BlockPlan:
    """seed: the run's. device: what batches are collated for."""
    return BlockPlan(
        block_size=config.block_size,
        num_anchors=section.num_anchors,
        sample_from_anchor=config.sample_from_anchor,
        contiguous=section.contiguous,
        chunk_blocks=section.chunk_blocks,
        seed=seed,
        page_locked=device.type == "cuda",
    )


def load_frozen(
    contract: CaptureContract, target_dir: Path, device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Input embedding and output head of the target [V, H]; one tensor where the checkpoint ties them.

    The head as stored: engines multiply a draft's states with it, without the scale of the target's own logits.
    """
    embedding, head = load_embedding(target_dir), load_raw_head(target_dir)
    tied = embedding.shape == head.shape and torch.equal(embedding, head)
    # Rows beyond the vocabulary are padding of the checkpoint and must never win the argmax.
    placed = embedding[: contract.vocab_size].to(device, dtype)
    return placed, placed if tied else head[: contract.vocab_size].to(device, dtype)


def place(
    draft: DraftT, section: BlockSection, contract: CaptureContract, target_dir: Path, device: torch.device,
    dtype: torch.dtype,
) -> tuple[DraftT, torch.Tensor, torch.Tensor]:  # fmt: skip
    """The draft on the device, with its weights when it starts from an exported one; the frozen embedding and head."""
    if section.init_from:
        warm_start(draft, section.init_from)
    dtype = compute_dtype(dtype, device)
    return draft.to(device, dtype), *load_frozen(contract, target_dir, device, dtype)


class BlockStrategy(Strategy):
    """What strategies of block drafts share but for batch and objective. All terms have the same denominator."""

    def __init__(
        self, section: BlockSection, draft: BlockDraft, embedding_VH: torch.Tensor, head_VH: torch.Tensor, seed: int
    ) -> None:
        """embedding_VH, head_VH: the target's, frozen. seed: of the blocks drawn."""
        self._plan = block_plan(section, draft.config, seed, embedding_VH.device)
        self._embedding = embedding_VH
        self._head = head_VH

    def prepare(self, batch: dict[str, torch.Tensor]) -> Prepared:
        """Tensors that steer the host stay there: no micro-batch waits for the device."""
        device = self._embedding.device
        tensors = {name: x if name in ON_HOST else x.to(device, non_blocking=True) for name, x in batch.items()}
        denominator = tensors.pop("denominator")
        return Prepared(
            tensors=tensors,
            denominators={name: denominator for name in self.term_weights},
            num_tokens=int(batch["num_tokens"]),
            num_loss_tokens=int(batch["num_loss_tokens"]),
        )


def block_identity(section: BlockSection, config: BlockConfig) -> dict[str, str]:
    """Facts a resumed run must agree with, common to the family."""
    return {
        "strategy": section.name,
        "layers": ",".join(map(str, config.layer_ids)),
        "num_layers": str(config.num_layers),
        "intermediate_size": str(config.intermediate_size),
        "block_size": str(config.block_size),
        "mask_token_id": str(config.mask_token_id),
        "sliding_window": str(config.sliding_window),
        "num_anchors": str(section.num_anchors),
        "loss_decay": str(section.loss_decay),
        "contiguous": str(section.contiguous),
    }
