"""What a server captures: the JSON of SPECFLEET_CAPTURE."""

import json
from dataclasses import dataclass, fields
from typing import Any

from specfleet.contracts.errors import ConfigError

EXTRAS = ("teacher_argmax", "teacher_lse")
FINAL_STATES = ("none", "post_norm")
WRITERS = ("auto", "process", "thread")
_FEATURE_DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class Settings:
    store: str
    """URL of the pool (store/factory.py)."""
    layers: tuple[int, ...]
    """Ascending; k is the output of decoder layer k."""
    final_state: str = "post_norm"
    extras: tuple[str, ...] = ()
    dtype: str = "bfloat16"
    """Of captured features; the server computes in its own."""
    # Five batches of 8192 tokens at 50 KiB each: one that runs, one launched behind it, those on their way to the store and
    # those whose answers the scheduler sends when it comes round again. With less, the device waits.
    pending_bytes: int = 2 << 30
    """Admitted and not yet published. What does not fit waits outside SGLang's queue."""
    store_full_s: float = 60.0
    """How long a full pool is waited for."""
    writer: str = "auto"
    """Where hashing and storing run: `process`, one beside the scheduler's, or `thread`, in it; auto: a process on CUDA."""

    @classmethod
    def parse(cls, text: str) -> "Settings":
        """Raises ConfigError SF-SGLANG-SETTINGS."""
        try:
            values = json.loads(text)
        except ValueError as error:
            raise _bad(f"not JSON: {error}") from error
        known = {field.name for field in fields(cls)}
        if not isinstance(values, dict) or not {"store", "layers"} <= set(values) <= known:
            raise _bad(
                f"an object with store, layers and any of {', '.join(sorted(known - {'store', 'layers'}))}; got {text}"
            )
        arguments: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in values.items()
        }
        settings = cls(**arguments)
        settings._check()
        return settings

    def _check(self) -> None:
        layers = self.layers
        if not isinstance(layers, tuple) or not layers or not all(type(k) is int and k >= 0 for k in layers):
            raise _bad(f"layers is a list of at least one layer number, got {layers!r}")
        if list(layers) != sorted(set(layers)):
            raise _bad(f"layers must ascend without repetition, got {list(layers)}")
        if self.dtype not in _FEATURE_DTYPES:
            raise _bad(f"dtype {self.dtype!r} is none of {', '.join(_FEATURE_DTYPES)}")
        if self.final_state not in FINAL_STATES:
            raise _bad(f"final_state {self.final_state!r} is neither 'post_norm' nor 'none'")
        if not set(self.extras) <= set(EXTRAS):
            raise _bad(f"extras {list(self.extras)} are not among {', '.join(EXTRAS)}")
        if self.writer not in WRITERS:
            raise _bad(f"writer {self.writer!r} is none of {', '.join(WRITERS)}")
        if not self.pending_bytes > 0 or not self.store_full_s >= 0:
            raise _bad(f"pending_bytes {self.pending_bytes} and store_full_s {self.store_full_s} must be positive")


def _bad(why: str) -> ConfigError:
    return ConfigError("SF-SGLANG-SETTINGS", f"SPECFLEET_CAPTURE: {why}")
