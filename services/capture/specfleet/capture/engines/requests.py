"""One capture request to a server with the plugin: its form, and what its answers mean (sglang_plugin/__init__.py)."""

import base64
from dataclasses import dataclass
from typing import Any

from specfleet.capture import metrics
from specfleet.capture.sglang_plugin.request import KEY
from specfleet.contracts.errors import CaptureItemError, EngineError, RequestRefusedError, StoreError, StoreFullError
from specfleet.contracts.ids import sample_id
from specfleet.sglang.client import SGLangClient
from specfleet.wire.records_pb2 import FeatureSpec, PromptTask


@dataclass(frozen=True)
class Answer:
    """What a server says it did."""

    features: tuple[FeatureSpec, ...]
    """Objects that are in the store, in feature-table order."""
    num_tokens: int
    layers: tuple[int, ...]
    plugin: str


async def capture(client: SGLangClient, task: PromptTask, timeout_s: float) -> Answer:
    """Raises CaptureItemError when the prompt is to blame, StoreError when the store refused and nothing is left of the
    attempt, EngineError or UnreachableError for everything else."""
    sampling = {"max_new_tokens": 1, "temperature": 0, "custom_params": {KEY: _wish(task)}}
    try:
        answer = await client.generate({"input_ids": list(task.input_ids), "sampling_params": sampling}, timeout_s)
    except RequestRefusedError as error:
        raise CaptureItemError("SF-CAPTURE-REFUSED", error.message) from error
    try:
        [info] = answer["meta_info"][KEY]
    except (KeyError, TypeError, ValueError):
        raise EngineError(
            "SF-SGLANG-NO-CAPTURE",
            f"{client.url} answered without capturing: start it with specfleet's plugin installed and SPECFLEET_CAPTURE set",
        ) from None
    if not info["ok"]:
        raise _error(info)
    for part, seconds in info["seconds"].items():
        metrics.SINK_SECONDS.labels(part).inc(max(0.0, seconds))
    features = tuple(
        FeatureSpec(
            name=name,
            key=feature["key"],
            shape=feature["shape"],
            dtype=feature["dtype"],
            num_bytes=feature["bytes"],
            checksum=feature["checksum"],
        )
        for name, feature in info["features"].items()
    )
    return Answer(features, int(info["num_tokens"]), tuple(info["layers"]), str(info["plugin"]))


def _wish(task: PromptTask) -> dict[str, Any]:
    wish: dict[str, Any] = {
        "sample": sample_id(task.attempt),
        "store": task.store,
        "loss_mask": base64.b64encode(task.loss_mask).decode(),
    }
    if task.features:
        wish["features"] = list(task.features)
    return wish


def _error(info: dict[str, Any]) -> Exception:
    code, message = str(info["code"]), str(info["message"])
    if info["kind"] == "sample":
        return CaptureItemError(code, message)
    if code == "SF-STORE-FULL":
        return StoreFullError(code, message)
    # Keys that exist are an earlier request of this very attempt: only another attempt can succeed.
    if code.startswith("SF-STORE-") and code != "SF-STORE-KEY-EXISTS":
        return StoreError(code, message)
    return EngineError(code, message)
