"""The command line of a worker's own capture server, derived from the contract and the target's configuration."""

import asyncio
import json
import os
import shlex
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import structlog

from specfleet.capture.engines.base import resolve_device
from specfleet.capture.engines.table import EngineOptions
from specfleet.capture.sglang_plugin import ENVIRONMENT
from specfleet.capture.sglang_plugin.settings import Settings
from specfleet.contracts.capture import DTYPE_BYTES
from specfleet.sglang.interpreter import find_python
from specfleet.sglang.launch import Server, ServerOptions
from specfleet.store.tensors import dtype_name
from specfleet.target.dtypes import DTYPES, compute_dtype
from specfleet.target.facts import read_target_facts
from specfleet.target.hub import target_dir
from specfleet.wire.records_pb2 import CaptureContract

log = structlog.get_logger()

# SGLang 0.5.14 accepts prompts up to seven tokens below its context length (scheduler and tokenizer each keep a margin).
CONTEXT_HEADROOM = 7
# Key-value pool on a CPU: room for a few long prompts, and no more memory than a small machine can spare.
CPU_POOL_TOKENS, CPU_POOL_BYTES = 32_768, 2 << 30


def capture_settings(contract: CaptureContract, store_url: str) -> str:
    """SPECFLEET_CAPTURE for a server that captures under the contract."""
    settings = Settings(
        store=store_url,
        layers=tuple(contract.layers),
        final_state=contract.final_state,
        extras=tuple(contract.extras),
        dtype=contract.dtype,
    )
    return json.dumps(asdict(settings))


def server_options(
    options: EngineOptions, contract: CaptureContract, model: Path, text_config: dict[str, Any]
) -> ServerOptions:
    """model: the target's directory here. text_config: the language model part of its config.json."""
    device, _, index = resolve_device(options.device).partition(":")
    dtype = dtype_name(compute_dtype(DTYPES[contract.dtype], device))
    longest = int(text_config.get("max_position_embeddings") or 0)
    context = longest + CONTEXT_HEADROOM if longest else 0
    pool = 0
    if device == "cpu":
        fitting = CPU_POOL_BYTES // kv_bytes_per_token(text_config, dtype)
        pool = min(max(context, CPU_POOL_TOKENS), fitting)
    # A prompt is captured once and shares nothing with another one. At level info every batch is a line in the log.
    flags = [
        "--disable-radix-cache",
        "--log-level",
        "warning",
        *(["--base-gpu-id", index] if index else []),
        *shlex.split(options.sglang_flags),
    ]
    return ServerOptions(
        model=model,
        device=device,
        dtype=dtype,
        context_length=context,
        pool_tokens=pool,
        tensor_parallel=options.tensor_parallel,
        memory_fraction=options.memory_fraction,
        # A replayed prefill graph drops what the hooks attach to its output; and nothing is ever decoded.
        prefill_graphs=False,
        decode_graphs=False,
        trust_remote_code=contract.trust_remote_code,
        flags=tuple(flags),
        env={ENVIRONMENT: capture_settings(contract, options.store_url)},
    )


def kv_bytes_per_token(text_config: dict[str, Any], dtype: str) -> int:
    """Keys and values of every layer. An upper bound for targets that compress them."""
    heads = int(text_config.get("num_attention_heads") or 1)
    width = int(text_config.get("head_dim") or int(text_config["hidden_size"]) // heads)
    kv_heads = int(text_config.get("num_key_value_heads") or heads)
    return 2 * int(text_config["num_hidden_layers"]) * kv_heads * width * DTYPE_BYTES[dtype]


async def start_server(options: EngineOptions, contract: CaptureContract) -> Server:
    """A running server that captures under the contract. Raises HostError SF-SGLANG-PYTHON or SF-SGLANG-START."""
    python = find_python(options.sglang_python)
    model = await asyncio.to_thread(target_dir, options.target or contract.target)
    facts = await asyncio.to_thread(read_target_facts, model)
    chosen = server_options(options, contract, facts.path, facts.text_config)
    if chosen.device != "cpu":
        log.info(
            "CUDA graphs are off in the capture server: a replayed prefill drops captured states; it never decodes"
        )
    path = options.sglang_log or str(Path(tempfile.gettempdir()) / f"specfleet-sglang-{os.getpid()}.log")
    server = Server(python, chosen, Path(path))
    await server.start()
    return server
