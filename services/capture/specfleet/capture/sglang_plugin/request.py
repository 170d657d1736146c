"""One capture request and its answers, as they travel in `custom_params` and `meta_info`. Imports no torch."""

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from specfleet.contracts.capture import DTYPE_BYTES
from specfleet.contracts.errors import CaptureItemError, ConfigError, SpecfleetError
from specfleet.contracts.ids import parse_sample_id
from specfleet.wire.records_pb2 import FeatureSpec, TaskAttempt

KEY = "specfleet_capture"
_REQUIRED, _OPTIONAL = {"sample", "store", "loss_mask"}, {"features"}

FeatureTable = Mapping[str, tuple[str, int]]
"""Feature name → (dtype, elements per token), as contracts.capture.feature_table gives it."""


@dataclass
class CaptureRequest:
    """A parsed request. It travels to every rank of the server, so it holds plain values only until a rank fills `state`."""

    sample: str
    num_tokens: int
    loss_mask: bytes = b""
    features: tuple[str, ...] = ()
    num_bytes: int = 0
    answer: dict[str, Any] | None = None
    """The answer, once it is known: from then on nothing is captured."""
    state: Any = field(default=None, compare=False)
    """What this rank has captured so far (sink.Capture)."""

    @property
    def attempt(self) -> TaskAttempt:
        return parse_sample_id(self.sample)


@dataclass(frozen=True)
class Origin:
    """What every answer of a server says about where its features come from."""

    store: str
    layers: tuple[int, ...]
    engine: str
    plugin: str


def parse(raw: Any, input_ids: Sequence[int], vocab_size: int, store: str, table: FeatureTable) -> CaptureRequest:
    """Raises ConfigError for a request no prompt is to blame for, CaptureItemError for a prompt that cannot be captured."""
    if not isinstance(raw, dict) or not set(raw) >= _REQUIRED or not set(raw) <= _REQUIRED | _OPTIONAL:
        raise _unfit(f"it needs {', '.join(sorted(_REQUIRED))} and may have features; got {_names(raw)}")
    try:
        attempt = parse_sample_id(raw["sample"])
        mask = base64.b64decode(raw["loss_mask"], validate=True)
    except (ValueError, TypeError, AttributeError, binascii.Error) as error:
        raise _unfit(str(error)) from error
    if attempt.attempt < 1:
        raise _unfit(f"sample {raw['sample']!r} names no attempt")
    if raw["store"] != store:
        raise ConfigError(
            "SF-STORE-WRONG-POOL", f"the request is for pool {raw['store']!r}, this server writes to {store!r}"
        )
    features = tuple(raw.get("features") or table)
    if unknown := sorted(set(features) - set(table)):
        raise CaptureItemError("SF-CAPTURE-PROMPT", f"features {unknown} are not captured here, only {sorted(table)}")
    tokens = len(input_ids)
    if len(mask) != tokens:
        raise CaptureItemError("SF-CAPTURE-PROMPT", f"loss_mask has {len(mask)} bytes for {tokens} tokens")
    ids = np.asarray(input_ids)
    low, high = ids.min(), ids.max()
    if low < 0 or high >= vocab_size:
        raise CaptureItemError("SF-CAPTURE-TOKEN", f"token ids {low}..{high} leave the vocabulary 0..{vocab_size - 1}")
    ordered = tuple(name for name in table if name in features)
    num_bytes = tokens * sum(DTYPE_BYTES[table[name][0]] * table[name][1] for name in ordered)
    return CaptureRequest(raw["sample"], tokens, mask, ordered, num_bytes)


def refused(raw: Any, num_tokens: int, error: SpecfleetError) -> CaptureRequest:
    """A request that is answered with `error` instead of being captured."""
    sample = str(raw.get("sample", "")) if isinstance(raw, dict) else ""
    return CaptureRequest(sample, num_tokens, answer=failure(sample, error))


def failure(sample: str, error: SpecfleetError) -> dict[str, Any]:
    kind = "sample" if isinstance(error, CaptureItemError) else "infra"
    return {"ok": False, "sample": sample, "code": error.code, "message": error.message, "kind": kind}


def success(
    request: CaptureRequest, origin: Mapping[str, Any], specs: Sequence[FeatureSpec], seconds: dict[str, float]
) -> dict[str, Any]:
    """origin: the fields of an Origin."""
    features = {
        spec.name: {
            "key": spec.key,
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "bytes": spec.num_bytes,
            "checksum": spec.checksum,
        }
        for spec in specs
    }
    return {
        "ok": True,
        "sample": request.sample,
        "num_tokens": request.num_tokens,
        **origin,
        "features": features,
        "seconds": seconds,
    }


def _unfit(why: str) -> ConfigError:
    return ConfigError("SF-SGLANG-REQUEST", f"custom_params[{KEY!r}]: {why}")


def _names(raw: Any) -> str:
    return ", ".join(sorted(map(str, raw))) if isinstance(raw, dict) else type(raw).__name__
