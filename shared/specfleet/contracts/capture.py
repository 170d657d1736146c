"""The capture contract: its hash, its feature table and the bytes a prompt will occupy. Torch-free."""

import hashlib

from specfleet.wire.records_pb2 import CaptureContract

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "int64": 8, "int32": 4, "uint8": 1}


def contract_hash(contract: CaptureContract) -> str:
    """sha256 (hex) over every field that decides what a captured tensor holds. The path of the target is not one of them."""
    facts = (
        f"weights={contract.weights_hash}",
        f"tokenizer={contract.tokenizer_hash}",
        f"layers={','.join(str(layer) for layer in contract.layers)}",
        f"final_state={contract.final_state}",
        f"dtype={contract.dtype}",
        f"hidden_size={contract.hidden_size}",
        f"num_hidden_layers={contract.num_hidden_layers}",
        f"vocab_size={contract.vocab_size}",
        f"engine={contract.engine}",
        f"extras={','.join(sorted(contract.extras))}",
    )
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()


def contract_mismatches(expected: CaptureContract, measured: CaptureContract) -> list[str]:
    """Every field that differs, as "field: expected A, measured B"."""
    fields = (
        "weights_hash", "tokenizer_hash", "layers", "final_state", "dtype", "hidden_size", "num_hidden_layers",
        "vocab_size", "engine", "extras",
    )  # fmt: skip
    found = []
    for field in fields:
        a, b = getattr(expected, field), getattr(measured, field)
        if field in ("layers", "extras"):
            a, b = list(a), list(b)
        if a != b:
            found.append(f"{field}: expected {a}, measured {b}")
    return found


def contract_gaps(recorded: CaptureContract, wanted: CaptureContract) -> list[str]:
    """Why features captured under `recorded` cannot serve `wanted`, as "field: recorded A, wanted B"; empty when they can.

    More than is wanted may have been recorded: further layers, the final state, extras.
    """
    same = (
        "weights_hash", "tokenizer_hash", "dtype", "hidden_size", "num_hidden_layers", "vocab_size", "engine",
    )  # fmt: skip
    pairs = [(field, getattr(recorded, field), getattr(wanted, field)) for field in same]
    gaps = [(field, a, b) for field, a, b in pairs if a != b]
    if wanted.final_state not in ("none", recorded.final_state):
        gaps.append(("final_state", recorded.final_state, wanted.final_state))
    for field in ("layers", "extras"):
        a, b = list(getattr(recorded, field)), list(getattr(wanted, field))
        if not set(b) <= set(a):
            gaps.append((field, a, b))
    return [f"{field}: recorded {a}, wanted {b}" for field, a, b in gaps]


def feature_table(contract: CaptureContract) -> dict[str, tuple[str, int]]:
    """Feature name → (dtype, elements per token), in the order features are written.

    input_ids [T] int32 · loss_mask [T] uint8 · aux_states [T, K·H] · final_state [T, H] (post-norm) ·
    teacher_argmax [T] int32 · teacher_lse [T] float32.
    """
    table = {
        "input_ids": ("int32", 1),
        "loss_mask": ("uint8", 1),
        "aux_states": (contract.dtype, len(contract.layers) * contract.hidden_size),
    }
    if contract.final_state == "post_norm":
        table["final_state"] = (contract.dtype, contract.hidden_size)
    if "teacher_argmax" in contract.extras:
        table["teacher_argmax"] = ("int32", 1)
    if "teacher_lse" in contract.extras:
        table["teacher_lse"] = ("float32", 1)
    return table


def bytes_per_token(contract: CaptureContract) -> int:
    """Bytes one token of a captured sample occupies in the store."""
    return sum(DTYPE_BYTES[dtype] * elements for dtype, elements in feature_table(contract).values())
