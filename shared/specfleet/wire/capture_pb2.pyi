from specfleet.wire import records_pb2 as _records_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FailureClass(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FAILURE_CLASS_UNSPECIFIED: _ClassVar[FailureClass]
    FAILURE_CLASS_INFRA: _ClassVar[FailureClass]
    FAILURE_CLASS_SAMPLE: _ClassVar[FailureClass]
    FAILURE_CLASS_RETURNED: _ClassVar[FailureClass]
FAILURE_CLASS_UNSPECIFIED: FailureClass
FAILURE_CLASS_INFRA: FailureClass
FAILURE_CLASS_SAMPLE: FailureClass
FAILURE_CLASS_RETURNED: FailureClass

class PoolStats(_message.Message):
    __slots__ = ("store", "capacity_bytes", "used_bytes")
    STORE_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    store: str
    capacity_bytes: int
    used_bytes: int
    def __init__(self, store: _Optional[str] = ..., capacity_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ...) -> None: ...

class RegisterWorkerRequest(_message.Message):
    __slots__ = ("worker_id", "host", "pid", "engine", "engine_version", "pool", "bound_target")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_VERSION_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    BOUND_TARGET_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    host: str
    pid: int
    engine: str
    engine_version: str
    pool: PoolStats
    bound_target: str
    def __init__(self, worker_id: _Optional[str] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., engine: _Optional[str] = ..., engine_version: _Optional[str] = ..., pool: _Optional[_Union[PoolStats, _Mapping]] = ..., bound_target: _Optional[str] = ...) -> None: ...

class RegisterWorkerResponse(_message.Message):
    __slots__ = ("heartbeat_s",)
    HEARTBEAT_S_FIELD_NUMBER: _ClassVar[int]
    heartbeat_s: float
    def __init__(self, heartbeat_s: _Optional[float] = ...) -> None: ...

class HeartbeatWorkerRequest(_message.Message):
    __slots__ = ("worker_id", "state", "contract_hash", "pool", "claims", "numbers")
    class NumbersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    CONTRACT_HASH_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    CLAIMS_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    state: str
    contract_hash: str
    pool: PoolStats
    claims: _containers.RepeatedCompositeFieldContainer[_records_pb2.TaskAttempt]
    numbers: _containers.ScalarMap[str, float]
    def __init__(self, worker_id: _Optional[str] = ..., state: _Optional[str] = ..., contract_hash: _Optional[str] = ..., pool: _Optional[_Union[PoolStats, _Mapping]] = ..., claims: _Optional[_Iterable[_Union[_records_pb2.TaskAttempt, _Mapping]]] = ..., numbers: _Optional[_Mapping[str, float]] = ...) -> None: ...

class HeartbeatWorkerResponse(_message.Message):
    __slots__ = ("contract", "contract_hash", "revoked", "unknown", "quarantined", "may_pull", "max_batch_tokens")
    CONTRACT_FIELD_NUMBER: _ClassVar[int]
    CONTRACT_HASH_FIELD_NUMBER: _ClassVar[int]
    REVOKED_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    MAY_PULL_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    contract: _records_pb2.CaptureContract
    contract_hash: str
    revoked: _containers.RepeatedCompositeFieldContainer[_records_pb2.TaskAttempt]
    unknown: bool
    quarantined: str
    may_pull: bool
    max_batch_tokens: int
    def __init__(self, contract: _Optional[_Union[_records_pb2.CaptureContract, _Mapping]] = ..., contract_hash: _Optional[str] = ..., revoked: _Optional[_Iterable[_Union[_records_pb2.TaskAttempt, _Mapping]]] = ..., unknown: _Optional[bool] = ..., quarantined: _Optional[str] = ..., may_pull: _Optional[bool] = ..., max_batch_tokens: _Optional[int] = ...) -> None: ...

class AttestWorkerRequest(_message.Message):
    __slots__ = ("worker_id", "contract_hash", "facts", "engine_version", "plugin_version")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    CONTRACT_HASH_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_VERSION_FIELD_NUMBER: _ClassVar[int]
    PLUGIN_VERSION_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    contract_hash: str
    facts: _records_pb2.CaptureContract
    engine_version: str
    plugin_version: str
    def __init__(self, worker_id: _Optional[str] = ..., contract_hash: _Optional[str] = ..., facts: _Optional[_Union[_records_pb2.CaptureContract, _Mapping]] = ..., engine_version: _Optional[str] = ..., plugin_version: _Optional[str] = ...) -> None: ...

class AttestWorkerResponse(_message.Message):
    __slots__ = ("accepted", "mismatches")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    MISMATCHES_FIELD_NUMBER: _ClassVar[int]
    accepted: bool
    mismatches: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, accepted: _Optional[bool] = ..., mismatches: _Optional[_Iterable[str]] = ...) -> None: ...

class ClaimTasksRequest(_message.Message):
    __slots__ = ("worker_id", "attempts")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    attempts: _containers.RepeatedCompositeFieldContainer[_records_pb2.TaskAttempt]
    def __init__(self, worker_id: _Optional[str] = ..., attempts: _Optional[_Iterable[_Union[_records_pb2.TaskAttempt, _Mapping]]] = ...) -> None: ...

class ClaimResult(_message.Message):
    __slots__ = ("attempt", "accepted", "deadline_unix_ms", "reason")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    attempt: _records_pb2.TaskAttempt
    accepted: bool
    deadline_unix_ms: int
    reason: str
    def __init__(self, attempt: _Optional[_Union[_records_pb2.TaskAttempt, _Mapping]] = ..., accepted: _Optional[bool] = ..., deadline_unix_ms: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class ClaimTasksResponse(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[ClaimResult]
    def __init__(self, results: _Optional[_Iterable[_Union[ClaimResult, _Mapping]]] = ...) -> None: ...

class TaskFailure(_message.Message):
    __slots__ = ("attempt", "failure_class", "reason")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    FAILURE_CLASS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    attempt: _records_pb2.TaskAttempt
    failure_class: FailureClass
    reason: str
    def __init__(self, attempt: _Optional[_Union[_records_pb2.TaskAttempt, _Mapping]] = ..., failure_class: _Optional[_Union[FailureClass, str]] = ..., reason: _Optional[str] = ...) -> None: ...

class FailTasksRequest(_message.Message):
    __slots__ = ("worker_id", "failures")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    failures: _containers.RepeatedCompositeFieldContainer[TaskFailure]
    def __init__(self, worker_id: _Optional[str] = ..., failures: _Optional[_Iterable[_Union[TaskFailure, _Mapping]]] = ...) -> None: ...

class FailTasksResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ConfirmReleasesRequest(_message.Message):
    __slots__ = ("worker_id", "outbox_ids")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    OUTBOX_IDS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    outbox_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, worker_id: _Optional[str] = ..., outbox_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ConfirmReleasesResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
