"""What an engine's loader expects of an export: a table of tensors, derived from config.json the way the engine does it.

Engines skip names they do not know and keep random weights for names they miss, both silently. So the exporter and the
importer compare name by name and shape by shape, and refuse on any difference.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from specfleet.contracts.errors import ExportError


@dataclass(frozen=True)
class Expected:
    """One tensor of a loader table. dtype None: any floating dtype."""

    shape: tuple[int, ...]
    required: bool = True
    dtype: torch.dtype | None = None


Table = dict[str, Expected]


def check_against_table(tensors: Mapping[str, torch.Tensor], table: Table, where: str) -> None:
    """Raises ExportError SF-EXPORT-TENSORS that lists every leftover, missing, misshapen or mistyped tensor."""
    problems = [f"leftover {name} {list(tensors[name].shape)}" for name in sorted(tensors.keys() - table.keys())]
    for name, expected in table.items():
        tensor = tensors.get(name)
        if tensor is None:
            if expected.required:
                problems.append(f"missing {name} {list(expected.shape)}")
        elif tuple(tensor.shape) != expected.shape:
            problems.append(f"misshapen {name}: {list(tensor.shape)}, expected {list(expected.shape)}")
        elif expected.dtype is not None and tensor.dtype != expected.dtype:
            problems.append(f"mistyped {name}: {tensor.dtype}, expected {expected.dtype}")
        elif expected.dtype is None and not tensor.dtype.is_floating_point:
            problems.append(f"mistyped {name}: {tensor.dtype}, expected a floating dtype")
    if problems:
        raise ExportError(
            "SF-EXPORT-TENSORS",
            f"{where} does not match the engine's loader table ({len(problems)} differences): {'; '.join(problems)}",
        )


def eagle3_table(config: Mapping[str, Any], layer: str, *, embedding: bool) -> Table:
    """Tensors of an EAGLE-3 draft for a config.json. layer: prefix of the decoder layer; embedding: may ship its own."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads", heads)
    head_dim = config.get("head_dim") or hidden // heads
    inner, vocab = config["intermediate_size"], config["vocab_size"]
    draft_vocab = config.get("draft_vocab_size") or vocab
    aux_size, num_aux = config.get("target_hidden_size") or hidden, config.get("num_aux_hidden_states") or 3
    table = {
        "fc.weight": Expected((hidden, num_aux * aux_size)),
        f"{layer}.input_layernorm.weight": Expected((hidden,)),
        f"{layer}.hidden_norm.weight": Expected((hidden,)),
        f"{layer}.post_attention_layernorm.weight": Expected((hidden,)),
        f"{layer}.self_attn.q_proj.weight": Expected((heads * head_dim, 2 * hidden)),
        f"{layer}.self_attn.k_proj.weight": Expected((kv_heads * head_dim, 2 * hidden)),
        f"{layer}.self_attn.v_proj.weight": Expected((kv_heads * head_dim, 2 * hidden)),
        f"{layer}.self_attn.o_proj.weight": Expected((hidden, heads * head_dim)),
        f"{layer}.mlp.gate_proj.weight": Expected((inner, hidden)),
        f"{layer}.mlp.up_proj.weight": Expected((inner, hidden)),
        f"{layer}.mlp.down_proj.weight": Expected((hidden, inner)),
        "norm.weight": Expected((hidden,)),
        "lm_head.weight": Expected((draft_vocab, hidden)),
        "d2t": Expected((draft_vocab,), dtype=torch.int64),
        "t2d": Expected((vocab,), dtype=torch.bool),
    }
    if config.get("fc_norm"):
        table |= {f"fc_norm.{index}.weight": Expected((aux_size,)) for index in range(num_aux)}
    if embedding:
        table["embed_tokens.weight"] = Expected((vocab, hidden), required=False)
    return table
