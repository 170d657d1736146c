"""Assembles the EAGLE-3 strategy: draft, frozen teacher, batch, objective."""

from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from specfleet.config.models import RunConfig, Eagle3Section
from specfleet.contracts.errors import ConfigError
from specfleet.drafts.eagle3 import Eagle3Config, Eagle3Draft
from specfleet.target.dtypes import compute_dtype
from specfleet.target.weights import load_embedding, load_head, read_text_config
from specfleet.trainer.strategies.base import Objective, Prepared, Strategy
from specfleet.trainer.strategies.eagle3.batch import collate
from specfleet.trainer.strategies.eagle3.objective import eagle3_objective, step_name
from specfleet.trainer.strategies.soft_ce import CHUNK_ROWS
from specfleet.trainer.strategies.teacher import FrozenTeacher
from specfleet.wire.records_pb2 import CaptureContract

if TYPE_CHECKING:
    from specfleet.data.prompt_set import PromptSet


class Eagle3Strategy(Strategy):
    """term_weights: step_i → step_decay**i. Each term is a mean over the supervised rows of its step."""

    def __init__(
        self, section: Eagle3Section, draft: Eagle3Draft, embedding_VH: torch.Tensor, teacher: FrozenTeacher
    ) -> None:
        self.draft = draft
        self.term_weights = {step_name(i): section.step_decay**i for i in range(section.ttt_length)}
        self.chunk_rows = CHUNK_ROWS
        self._section = section
        self._embedding = embedding_VH
        self._teacher = teacher

    def collate(self, samples: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        return collate(samples, self._section.ttt_length, self._section.mask_align)

    @torch.no_grad()
    def prepare(self, batch: dict[str, torch.Tensor]) -> Prepared:
        device = self._embedding.device
        on_host = {"row_counts", "active_counts", "num_tokens", "num_loss_tokens"}
        tensors = {name: x if name in on_host else x.to(device, non_blocking=True) for name, x in batch.items()}
        states = tensors.pop("teacher_states")
        logits, lse = self._teacher.draft_logits(states)
        if "teacher_argmax" in tensors:
            argmax = tensors["teacher_argmax"].long()
        else:
            argmax = self._teacher.argmax(states, logits)
        in_vocab = self.draft.t2d[argmax]
        tensors.update(
            teacher_logits=logits, teacher_draft_lse=lse, teacher_argmax=argmax, teacher_in_vocab=in_vocab
        )
        judges = tensors["teacher_of"].split(batch["row_counts"].tolist())
        return Prepared(
            tensors=tensors,
            denominators={step_name(i): in_vocab[judge].sum().float() for i, judge in enumerate(judges)},
            num_tokens=int(batch["num_tokens"]),
            num_loss_tokens=int(batch["num_loss_tokens"]),
        )

    def objective(self, prepared: Prepared) -> Objective:
        return eagle3_objective(self.draft, self._embedding, prepared, len(self.term_weights), self.chunk_rows)

    def identity(self) -> dict[str, str]:
        config, section = self.draft.config, self._section
        return {
            "strategy": section.name,
            "layers": ",".join(map(str, config.layer_ids)),
            "draft_vocab_size": str(config.draft_vocab_size),
            "draft_vocab": sha256(self.draft.d2t.cpu().numpy().tobytes()).hexdigest(),
            "intermediate_size": str(config.intermediate_size),
            "ttt_length": str(section.ttt_length),
            "step_decay": str(section.step_decay),
            "mask_align": section.mask_align,
        }


def draft_config(section: Eagle3Section, contract: CaptureContract, text_config: dict[str, Any]) -> Eagle3Config:
    """Sizes of the draft for a target: heads, rotary settings and norms follow the target's config.json."""
    hidden, heads = contract.hidden_size, int(text_config["num_attention_heads"])
    rope = dict(text_config.get("rope_parameters") or {})
    scaling = rope or dict(text_config.get("rope_scaling") or {})
    theta = float(scaling.pop("rope_theta", text_config.get("rope_theta", 10000.0)))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    return Eagle3Config(
        hidden_size=hidden,
        intermediate_size=section.intermediate_size or int(text_config["intermediate_size"]),
        num_attention_heads=heads,
        num_key_value_heads=int(text_config.get("num_key_value_heads") or heads),
        head_dim=int(text_config.get("head_dim") or hidden // heads),
        vocab_size=contract.vocab_size,
        draft_vocab_size=min(section.draft_vocab_size or contract.vocab_size, contract.vocab_size),
        target_hidden_size=hidden,
        layer_ids=tuple(contract.layers),
        max_position_embeddings=int(text_config.get("max_position_embeddings", 2048)),
        rms_norm_eps=float(text_config.get("rms_norm_eps", 1e-5)),
        rope_theta=theta,
        rope_scaling=None if kind == "default" else scaling,
    )


def build_eagle3(
    config: RunConfig,
    contract: CaptureContract,
    target_dir: Path,
    prompt_set: "PromptSet",
    total_steps: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Eagle3Strategy:
    """Draft initialised from torch's global generator; vocabulary from the supervised tokens of the prompt set."""
    if contract.final_state != "post_norm":
        raise ConfigError("SF-CONFIG-FINAL-STATE", f"eagle3 needs final_state post_norm, the contract says {contract.final_state!r}")
    sizes = draft_config(config.strategy, contract, read_text_config(target_dir))
    draft = Eagle3Draft(sizes)
    draft.set_vocabulary(*_vocabulary(sizes, prompt_set, target_dir))
    dtype = compute_dtype(dtype, device)
    draft = draft.to(device, dtype)
    chosen = draft.t2d.nonzero().flatten()
    # Rows beyond the vocabulary are padding of the checkpoint and must never win the argmax.
    head = load_head(target_dir)[: contract.vocab_size].to(device, dtype)
    teacher = FrozenTeacher(head, chosen, full="teacher_argmax" not in contract.extras)
    return Eagle3Strategy(config.strategy, draft, load_embedding(target_dir).to(device, dtype), teacher)


def _vocabulary(
    sizes: Eagle3Config, prompt_set: "PromptSet", target_dir: Path
) -> tuple[torch.Tensor, torch.Tensor]:
    """d2t [V_d] offsets and t2d [V]. The target's stop tokens are always in: a draft that cannot end drafts past the end."""
    from specfleet.data.vocab import build_vocab_map, count_loss_tokens
    from specfleet.target.facts import read_target_facts

    stops = [token for token in read_target_facts(target_dir).eos_token_ids if token < sizes.vocab_size]
    counts = count_loss_tokens(prompt_set, sizes.vocab_size)
    mapping = build_vocab_map(counts, sizes.draft_vocab_size, stops)
    return torch.from_numpy(mapping.d2t), torch.from_numpy(mapping.t2d)
