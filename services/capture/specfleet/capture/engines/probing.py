"""What a server is, measured: the target it names is hashed here, and a canary prompt shows what it captures."""

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from specfleet.capture.engines.requests import Answer, capture
from specfleet.contracts.capture import feature_table
from specfleet.contracts.errors import ConfigError, ContractError, HostError
from specfleet.contracts.ids import feature_key, task_key
from specfleet.sglang.client import ServerFacts, SGLangClient
from specfleet.store.base import FeatureStore
from specfleet.target.facts import TargetFacts, read_target_facts, tokenizer_hash
from specfleet.target.hub import target_dir
from specfleet.wire.records_pb2 import CaptureContract, FeatureSpec, PromptTask, SampleRef, TaskAttempt

CANARY_RUN = "canary"
CANARY_TOKENS = 16
# The first request of a server may compile kernels.
CANARY_S = 300.0


@dataclass(frozen=True)
class Probed:
    server: ServerFacts
    measured: CaptureContract
    plugin: str

    @property
    def version(self) -> str:
        return f"sglang {self.server.version} {self.server.dtype} tp {self.server.tensor_parallel}"


async def probe(client: SGLangClient, asked: CaptureContract, store: FeatureStore) -> Probed:
    """Facts of a server that are to be compared with the contract; nothing in them is copied from it.

    Raises HostError SF-SGLANG-TARGET when the target's files cannot be read here, ContractError SF-SGLANG-CANARY when the
    canary is not what the server says or not in this worker's pool, and whatever the request raises.
    """
    server = await client.facts()
    try:
        target = await asyncio.to_thread(lambda: read_target_facts(target_dir(server.model_path)))
        tokens = await asyncio.to_thread(lambda: tokenizer_hash(target_dir(server.tokenizer_path, "none")))
    except (ConfigError, HostError) as error:
        raise HostError(
            "SF-SGLANG-TARGET",
            f"{client.url} serves {server.model_path}, whose files cannot be hashed here: {error.message}. Mount them on "
            "this machine under the same path",
        ) from error
    answer = await _canary(client, target, store)
    by_name = {spec.name: spec for spec in answer.features}
    aux = by_name.get("aux_states")
    if aux is None or len(aux.shape) != 2 or not answer.layers:
        raise ContractError(
            "SF-SGLANG-CANARY", f"{client.url} captured {_shapes(answer.features)} for layers {list(answer.layers)}"
        )
    measured = CaptureContract(
        target=asked.target,
        weights_hash=target.weights_hash,
        tokenizer_hash=tokens,
        layers=answer.layers,
        final_state="post_norm" if "final_state" in by_name else "none",
        dtype=aux.dtype,
        hidden_size=aux.shape[1] // len(answer.layers),
        num_hidden_layers=target.num_hidden_layers,
        vocab_size=target.vocab_size,
        engine="sglang",
        extras=[name for name in ("teacher_argmax", "teacher_lse") if name in by_name],
        trust_remote_code=asked.trust_remote_code,
    )
    unlike = {
        name: row
        for name, row in feature_table(measured).items()
        if name not in by_name or by_name[name].dtype != row[0] or by_name[name].shape[0] != CANARY_TOKENS
    }
    if unlike or answer.num_tokens != CANARY_TOKENS:
        raise ContractError(
            "SF-SGLANG-CANARY",
            f"{client.url} captured {_shapes(answer.features)} of a prompt of {CANARY_TOKENS} tokens; wrong: {sorted(unlike)}",
        )
    return Probed(server, measured, answer.plugin)


async def _canary(client: SGLangClient, target: TargetFacts, store: FeatureStore) -> Answer:
    """Captures a prompt under a name of its own, reads it back through this worker's store, and removes it."""
    attempt = TaskAttempt(task=task_key(CANARY_RUN, 0, secrets.randbits(48)), attempt=1)
    ids = [index % target.vocab_size for index in range(1, CANARY_TOKENS + 1)]
    task = PromptTask(attempt=attempt, input_ids=ids, loss_mask=b"\1" * len(ids), store=store.name)
    prefix = feature_key(store.name, attempt, "")
    keys = {
        prefix + name
        for name in ("input_ids", "loss_mask", "aux_states", "final_state", "teacher_argmax", "teacher_lse")
    }
    try:
        answer = await capture(client, task, CANARY_S)
        keys |= {spec.key for spec in answer.features}
        ref = SampleRef(attempt=attempt, store=store.name, num_tokens=len(ids), features=answer.features)
        stored = await asyncio.to_thread(store.get, ref)
        if stored["input_ids"].tolist() != ids:
            raise ContractError("SF-SGLANG-CANARY", f"{client.url} stored other token ids than the canary's")
        return answer
    finally:
        await asyncio.to_thread(store.remove, sorted(keys))


def _shapes(features: Sequence[FeatureSpec]) -> str:
    return ", ".join(f"{spec.name} {spec.dtype} {list(spec.shape)}" for spec in features) or "nothing"
