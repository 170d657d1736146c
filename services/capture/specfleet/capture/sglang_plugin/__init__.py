"""Capture inside an unmodified SGLang server: its entry point in the group `sglang.srt.plugins`.

The server is told what to capture by the environment variable SPECFLEET_CAPTURE, a JSON object (settings.py):

    {"store": "mooncake://HOST:PORT/POOL?client=HOST:PORT", "layers": [2, 8, 13], "final_state": "post_norm",
     "extras": ["teacher_argmax"], "dtype": "bfloat16", "pending_bytes": 2147483648, "store_full_s": 60}

Without it the plugin does nothing. With it, a server that cannot capture never listens: it prints one line on stderr,
"specfleet: [SF-…] …", and ends. An unknown version of SGLang, a hooked function that is not the tested one and settings that
make no sense end the first process (exit code 3 or 2); options that capture excludes and layers the model does not have show
in a scheduler, and SGLang then kills the whole server (SIGKILL).

One capture is one request `POST /generate`:

    {"input_ids": [...], "sampling_params": {"max_new_tokens": 1, "temperature": 0, "custom_params": {"specfleet_capture": {
        "sample": "RUN/eEEEE-pIIIIIIIII/aN", "store": "POOL", "loss_mask": base64 of one byte per token,
        "features": ["input_ids", "loss_mask", "aux_states", "final_state"]   # optional; default: all of the server's
    }}}}

The server writes every feature itself, input_ids and loss_mask too, in feature-table order under
`feature_key(POOL, attempt, feature)`: one put, all or nothing. The answer comes when the objects are published, in
`meta_info["specfleet_capture"]`, a list with one element:

    {"ok": true, "sample": …, "store": POOL, "num_tokens": T, "layers": […], "engine": "sglang 0.5.14", "plugin": "specfleet 0.1.0",
     "features": {NAME: {"key", "dtype", "shape", "bytes", "checksum"}},
     "seconds": {"copy", "wait", "hash", "put"}}     # device to host · queue and full pool · checksum · store: its share
    {"ok": false, "sample": …, "code": "SF-…", "message": …, "kind": "sample" | "infra"}

"sample" failures are the prompt's fault and cost its budget (SF-CAPTURE-…: token ids outside the vocabulary, a mask of another
length, NaN). "infra" failures are not (SF-STORE-…: pool full longer than store_full_s, keys that exist already, a broken
store; SF-SGLANG-…: a request that the plugin cannot serve, such as max_new_tokens > 1, or a request that was aborted). A
prompt longer than the server's context is refused by SGLang itself: HTTP 400. Whoever gives up on an answer starts a new
attempt and removes what the old one may have stored: keys are written once.

Ordinary requests, also in the same batch, are served as if the plugin were not there.
"""

import os
import sys

from specfleet.contracts.errors import EXIT_ENVIRONMENT, SpecfleetError

ENVIRONMENT = "SPECFLEET_CAPTURE"

_active = False


def activate() -> None:
    """Called by SGLang in the server's first process and in each scheduler, before anything else is started there.

    SGLang only logs what a plugin raises and serves on without it; SystemExit ends the process. A patched SGLang that also
    sees the entry point calls this twice.
    """
    global _active
    text = os.environ.get(ENVIRONMENT)
    if not text or _active:
        return
    _active = True
    try:
        from specfleet.capture.sglang_plugin.install import install

        install(text)
    except SpecfleetError as error:
        print(f"specfleet: {error}", file=sys.stderr, flush=True)
        raise SystemExit(error.exit_code) from error
    except Exception as error:
        print(f"specfleet: [SF-SGLANG-PLUGIN] {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        raise SystemExit(EXIT_ENVIRONMENT) from error
