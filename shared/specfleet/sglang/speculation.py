"""How a server is started so that it speculates with an exported draft, and which drafts it can serve at all."""

from dataclasses import replace
from pathlib import Path

from specfleet.sglang import CPU_SPECULATION
from specfleet.sglang.launch import TESTED_VERSION, ServerOptions

# Draft architecture → SGLang's name for how to run it.
ALGORITHMS = {"eagle3": "EAGLE3", "dflash": "DFLASH"}
# Interpreted kernels; and inductor would compile helpers for longer than they ever run.
_CPU_ENV = {CPU_SPECULATION: "1", "TRITON_INTERPRET": "1", "TORCHDYNAMO_DISABLE": "1"}


def why_not_served(kind: str, engine: str) -> str:
    """Reason why the tested release does not serve a draft of this architecture and export layout; "" when it does."""
    if kind not in ALGORITHMS:
        return f"{kind} drafts are not served by SGLang {TESTED_VERSION}"
    if engine != "sglang":
        return f"an export for {engine} is not served by SGLang {TESTED_VERSION}: export it with --layout sglang"
    return ""


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
