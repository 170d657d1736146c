"""How a server is started so that it speculates with an exported draft, and which drafts it can serve at all."""

import re
from dataclasses import replace
from pathlib import Path

from specfleet.sglang import CPU_SPECULATION, CPU_SPECULATION_RELEASE
from specfleet.sglang.launch import ServerOptions

# Draft architecture → SGLang's name for how to run it.
ALGORITHMS = {"eagle3": "EAGLE3", "dflash": "DFLASH", "dspark": "DSPARK", "domino": "DFLASH"}
# … and the first of the releases read for this project that serves it.
SERVED_SINCE = {"eagle3": "0.5.14", "dflash": "0.5.14", "dspark": "0.5.17", "domino": "0.5.23"}
# SGLang itself refuses these on any other device.
_CUDA_ONLY = ("dspark", "domino")
# Interpreted kernels; and inductor would compile helpers for longer than they ever run.
_CPU_ENV = {CPU_SPECULATION: "1", "TRITON_INTERPRET": "1", "TORCHDYNAMO_DISABLE": "1"}


def why_not_served(kind: str, engine: str, version: str, device: str) -> str:
    """Reason, with code SF-SGLANG-SERVE, why SGLang `version` does not serve a draft of this architecture and export layout on
    the device (cpu or cuda); "" when it does."""
    reason = _reason(kind, engine, version, device)
    return f"[SF-SGLANG-SERVE] {reason}" if reason else ""


def _reason(kind: str, engine: str, version: str, device: str) -> str:
    if kind not in ALGORITHMS:
        return f"no release of SGLang serves {kind} drafts"
    if engine != "sglang":
        return f"SGLang does not serve an export for {engine}: export it with --layout sglang"
    if _numbers(version) < _numbers(SERVED_SINCE[kind]):
        return f"{kind} drafts are served by SGLang {SERVED_SINCE[kind]} and later, this is {version}"
    if device == "cpu" and kind in _CUDA_ONLY:
        return f"SGLang serves {kind} drafts on a GPU only"
    if device == "cpu" and version != CPU_SPECULATION_RELEASE:
        return f"speculation without a GPU is written for SGLang {CPU_SPECULATION_RELEASE}, this is {version}"
    return ""


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


def speculating(options: ServerOptions, kind: str, export_dir: Path, num_draft_tokens: int) -> ServerOptions:
    """The same server with a draft: chains of num_draft_tokens guesses, one branch."""
    flags = [
        *("--speculative-algorithm", ALGORITHMS[kind]),
        *("--speculative-draft-model-path", str(export_dir)),
        # The anchor counts as well.
        *("--speculative-num-draft-tokens", str(num_draft_tokens + 1)),
    ]
    if kind == "eagle3":
        flags += ["--speculative-num-steps", str(num_draft_tokens), "--speculative-eagle-topk", "1"]
    if options.device == "cpu":
        # Later flags win: interpreted triton kernels know how to verify a chain, torch's attention does not.
        flags += ["--attention-backend", "triton"]
        options = replace(options, env={**options.env, **_CPU_ENV})
    return replace(options, flags=(*options.flags, *flags))
