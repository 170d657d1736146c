from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TaskKey(_message.Message):
    __slots__ = ("run_id", "epoch", "prompt_index")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PROMPT_INDEX_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    epoch: int
    prompt_index: int
    def __init__(self, run_id: _Optional[str] = ..., epoch: _Optional[int] = ..., prompt_index: _Optional[int] = ...) -> None: ...

class TaskAttempt(_message.Message):
    __slots__ = ("task", "attempt")
    TASK_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    task: TaskKey
    attempt: int
    def __init__(self, task: _Optional[_Union[TaskKey, _Mapping]] = ..., attempt: _Optional[int] = ...) -> None: ...

class PromptTask(_message.Message):
    __slots__ = ("attempt", "contract_hash", "input_ids", "loss_mask", "store", "features", "reserved_bytes")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CONTRACT_HASH_FIELD_NUMBER: _ClassVar[int]
    INPUT_IDS_FIELD_NUMBER: _ClassVar[int]
    LOSS_MASK_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    RESERVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    attempt: TaskAttempt
    contract_hash: str
    input_ids: _containers.RepeatedScalarFieldContainer[int]
    loss_mask: bytes
    store: str
    features: _containers.RepeatedScalarFieldContainer[str]
    reserved_bytes: int
    def __init__(self, attempt: _Optional[_Union[TaskAttempt, _Mapping]] = ..., contract_hash: _Optional[str] = ..., input_ids: _Optional[_Iterable[int]] = ..., loss_mask: _Optional[bytes] = ..., store: _Optional[str] = ..., features: _Optional[_Iterable[str]] = ..., reserved_bytes: _Optional[int] = ...) -> None: ...

class FeatureSpec(_message.Message):
    __slots__ = ("name", "key", "shape", "dtype", "num_bytes", "checksum")
    NAME_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    name: str
    key: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    num_bytes: int
    checksum: int
    def __init__(self, name: _Optional[str] = ..., key: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ..., num_bytes: _Optional[int] = ..., checksum: _Optional[int] = ...) -> None: ...

class SampleRef(_message.Message):
    __slots__ = ("attempt", "contract_hash", "store", "num_tokens", "num_loss_tokens", "num_bytes", "features", "worker_id", "captured_at_unix_ms", "capture_s")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CONTRACT_HASH_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOSS_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    CAPTURED_AT_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    CAPTURE_S_FIELD_NUMBER: _ClassVar[int]
    attempt: TaskAttempt
    contract_hash: str
    store: str
    num_tokens: int
    num_loss_tokens: int
    num_bytes: int
    features: _containers.RepeatedCompositeFieldContainer[FeatureSpec]
    worker_id: str
    captured_at_unix_ms: int
    capture_s: float
    def __init__(self, attempt: _Optional[_Union[TaskAttempt, _Mapping]] = ..., contract_hash: _Optional[str] = ..., store: _Optional[str] = ..., num_tokens: _Optional[int] = ..., num_loss_tokens: _Optional[int] = ..., num_bytes: _Optional[int] = ..., features: _Optional[_Iterable[_Union[FeatureSpec, _Mapping]]] = ..., worker_id: _Optional[str] = ..., captured_at_unix_ms: _Optional[int] = ..., capture_s: _Optional[float] = ...) -> None: ...

class MicroBatch(_message.Message):
    __slots__ = ("samples",)
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    samples: _containers.RepeatedCompositeFieldContainer[SampleRef]
    def __init__(self, samples: _Optional[_Iterable[_Union[SampleRef, _Mapping]]] = ...) -> None: ...

class StepPlan(_message.Message):
    __slots__ = ("run_id", "generation", "step", "rank", "world", "kind", "revision", "micro_batches", "epoch", "reason")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[StepPlan.Kind]
        KIND_STEP: _ClassVar[StepPlan.Kind]
        KIND_END: _ClassVar[StepPlan.Kind]
        KIND_STOP: _ClassVar[StepPlan.Kind]
    KIND_UNSPECIFIED: StepPlan.Kind
    KIND_STEP: StepPlan.Kind
    KIND_END: StepPlan.Kind
    KIND_STOP: StepPlan.Kind
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    MICRO_BATCHES_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    generation: int
    step: int
    rank: int
    world: int
    kind: StepPlan.Kind
    revision: int
    micro_batches: _containers.RepeatedCompositeFieldContainer[MicroBatch]
    epoch: int
    reason: str
    def __init__(self, run_id: _Optional[str] = ..., generation: _Optional[int] = ..., step: _Optional[int] = ..., rank: _Optional[int] = ..., world: _Optional[int] = ..., kind: _Optional[_Union[StepPlan.Kind, str]] = ..., revision: _Optional[int] = ..., micro_batches: _Optional[_Iterable[_Union[MicroBatch, _Mapping]]] = ..., epoch: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class Release(_message.Message):
    __slots__ = ("outbox_id", "store", "keys", "num_bytes")
    OUTBOX_ID_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    outbox_id: int
    store: str
    keys: _containers.RepeatedScalarFieldContainer[str]
    num_bytes: int
    def __init__(self, outbox_id: _Optional[int] = ..., store: _Optional[str] = ..., keys: _Optional[_Iterable[str]] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("run_id", "kind", "at_unix_ms", "service", "message", "numbers", "labels")
    class NumbersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    AT_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    SERVICE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    kind: str
    at_unix_ms: int
    service: str
    message: str
    numbers: _containers.ScalarMap[str, float]
    labels: _containers.ScalarMap[str, str]
    def __init__(self, run_id: _Optional[str] = ..., kind: _Optional[str] = ..., at_unix_ms: _Optional[int] = ..., service: _Optional[str] = ..., message: _Optional[str] = ..., numbers: _Optional[_Mapping[str, float]] = ..., labels: _Optional[_Mapping[str, str]] = ...) -> None: ...

class CaptureContract(_message.Message):
    __slots__ = ("target", "weights_hash", "tokenizer_hash", "layers", "final_state", "dtype", "hidden_size", "num_hidden_layers", "vocab_size", "engine", "extras", "trust_remote_code")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_HASH_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_HASH_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    FINAL_STATE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_HIDDEN_LAYERS_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    EXTRAS_FIELD_NUMBER: _ClassVar[int]
    TRUST_REMOTE_CODE_FIELD_NUMBER: _ClassVar[int]
    target: str
    weights_hash: str
    tokenizer_hash: str
    layers: _containers.RepeatedScalarFieldContainer[int]
    final_state: str
    dtype: str
    hidden_size: int
    num_hidden_layers: int
    vocab_size: int
    engine: str
    extras: _containers.RepeatedScalarFieldContainer[str]
    trust_remote_code: bool
    def __init__(self, target: _Optional[str] = ..., weights_hash: _Optional[str] = ..., tokenizer_hash: _Optional[str] = ..., layers: _Optional[_Iterable[int]] = ..., final_state: _Optional[str] = ..., dtype: _Optional[str] = ..., hidden_size: _Optional[int] = ..., num_hidden_layers: _Optional[int] = ..., vocab_size: _Optional[int] = ..., engine: _Optional[str] = ..., extras: _Optional[_Iterable[str]] = ..., trust_remote_code: _Optional[bool] = ...) -> None: ...
