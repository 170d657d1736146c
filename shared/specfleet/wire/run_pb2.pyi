from specfleet.wire import records_pb2 as _records_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RunSnapshot(_message.Message):
    __slots__ = ("run_id", "state", "reason", "strategy", "target", "contract_hash", "prompt_set", "epochs", "num_prompts", "generation", "global_batch", "total_steps", "trained_steps", "checkpoint_step", "tasks", "captured_tokens", "trained_tokens", "capture_rate", "train_rate", "wait_share", "in_flight_bytes", "in_flight_samples", "low_bytes", "high_bytes", "low_samples", "high_samples", "metrics", "submitted_at_unix_ms", "updated_at_unix_ms", "output_dir", "config_yaml")
    class TasksEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STRATEGY_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    CONTRACT_HASH_FIELD_NUMBER: _ClassVar[int]
    PROMPT_SET_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPTS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_BATCH_FIELD_NUMBER: _ClassVar[int]
    TOTAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    TRAINED_STEPS_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_STEP_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    CAPTURED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRAINED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CAPTURE_RATE_FIELD_NUMBER: _ClassVar[int]
    TRAIN_RATE_FIELD_NUMBER: _ClassVar[int]
    WAIT_SHARE_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    LOW_BYTES_FIELD_NUMBER: _ClassVar[int]
    HIGH_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOW_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    HIGH_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    SUBMITTED_AT_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    UPDATED_AT_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_DIR_FIELD_NUMBER: _ClassVar[int]
    CONFIG_YAML_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    state: str
    reason: str
    strategy: str
    target: str
    contract_hash: str
    prompt_set: str
    epochs: int
    num_prompts: int
    generation: int
    global_batch: int
    total_steps: int
    trained_steps: int
    checkpoint_step: int
    tasks: _containers.ScalarMap[str, int]
    captured_tokens: int
    trained_tokens: int
    capture_rate: float
    train_rate: float
    wait_share: float
    in_flight_bytes: int
    in_flight_samples: int
    low_bytes: int
    high_bytes: int
    low_samples: int
    high_samples: int
    metrics: _containers.ScalarMap[str, float]
    submitted_at_unix_ms: int
    updated_at_unix_ms: int
    output_dir: str
    config_yaml: str
    def __init__(self, run_id: _Optional[str] = ..., state: _Optional[str] = ..., reason: _Optional[str] = ..., strategy: _Optional[str] = ..., target: _Optional[str] = ..., contract_hash: _Optional[str] = ..., prompt_set: _Optional[str] = ..., epochs: _Optional[int] = ..., num_prompts: _Optional[int] = ..., generation: _Optional[int] = ..., global_batch: _Optional[int] = ..., total_steps: _Optional[int] = ..., trained_steps: _Optional[int] = ..., checkpoint_step: _Optional[int] = ..., tasks: _Optional[_Mapping[str, int]] = ..., captured_tokens: _Optional[int] = ..., trained_tokens: _Optional[int] = ..., capture_rate: _Optional[float] = ..., train_rate: _Optional[float] = ..., wait_share: _Optional[float] = ..., in_flight_bytes: _Optional[int] = ..., in_flight_samples: _Optional[int] = ..., low_bytes: _Optional[int] = ..., high_bytes: _Optional[int] = ..., low_samples: _Optional[int] = ..., high_samples: _Optional[int] = ..., metrics: _Optional[_Mapping[str, float]] = ..., submitted_at_unix_ms: _Optional[int] = ..., updated_at_unix_ms: _Optional[int] = ..., output_dir: _Optional[str] = ..., config_yaml: _Optional[str] = ...) -> None: ...

class SubmitRunRequest(_message.Message):
    __slots__ = ("config_yaml", "prompt_set_uri", "contract", "run_id")
    CONFIG_YAML_FIELD_NUMBER: _ClassVar[int]
    PROMPT_SET_URI_FIELD_NUMBER: _ClassVar[int]
    CONTRACT_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    config_yaml: str
    prompt_set_uri: str
    contract: _records_pb2.CaptureContract
    run_id: str
    def __init__(self, config_yaml: _Optional[str] = ..., prompt_set_uri: _Optional[str] = ..., contract: _Optional[_Union[_records_pb2.CaptureContract, _Mapping]] = ..., run_id: _Optional[str] = ...) -> None: ...

class SubmitRunResponse(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: RunSnapshot
    def __init__(self, run: _Optional[_Union[RunSnapshot, _Mapping]] = ...) -> None: ...

class GetRunRequest(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class GetRunResponse(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: RunSnapshot
    def __init__(self, run: _Optional[_Union[RunSnapshot, _Mapping]] = ...) -> None: ...

class ListRunsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListRunsResponse(_message.Message):
    __slots__ = ("runs",)
    RUNS_FIELD_NUMBER: _ClassVar[int]
    runs: _containers.RepeatedCompositeFieldContainer[RunSnapshot]
    def __init__(self, runs: _Optional[_Iterable[_Union[RunSnapshot, _Mapping]]] = ...) -> None: ...

class WatchRunRequest(_message.Message):
    __slots__ = ("run_id", "interval_s")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    interval_s: float
    def __init__(self, run_id: _Optional[str] = ..., interval_s: _Optional[float] = ...) -> None: ...

class WatchRunResponse(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: RunSnapshot
    def __init__(self, run: _Optional[_Union[RunSnapshot, _Mapping]] = ...) -> None: ...

class PauseRunRequest(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class PauseRunResponse(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: RunSnapshot
    def __init__(self, run: _Optional[_Union[RunSnapshot, _Mapping]] = ...) -> None: ...

class ResumeRunRequest(_message.Message):
    __slots__ = ("run_id", "config_yaml")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    CONFIG_YAML_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    config_yaml: str
    def __init__(self, run_id: _Optional[str] = ..., config_yaml: _Optional[str] = ...) -> None: ...

class ResumeRunResponse(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: RunSnapshot
    def __init__(self, run: _Optional[_Union[RunSnapshot, _Mapping]] = ...) -> None: ...

class CancelRunRequest(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class CancelRunResponse(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: RunSnapshot
    def __init__(self, run: _Optional[_Union[RunSnapshot, _Mapping]] = ...) -> None: ...

class Checkpoint(_message.Message):
    __slots__ = ("run_id", "step", "generation", "uri", "digest", "committed_at_unix_ms", "final")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    URI_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_AT_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    FINAL_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    step: int
    generation: int
    uri: str
    digest: str
    committed_at_unix_ms: int
    final: bool
    def __init__(self, run_id: _Optional[str] = ..., step: _Optional[int] = ..., generation: _Optional[int] = ..., uri: _Optional[str] = ..., digest: _Optional[str] = ..., committed_at_unix_ms: _Optional[int] = ..., final: _Optional[bool] = ...) -> None: ...

class ListCheckpointsRequest(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class ListCheckpointsResponse(_message.Message):
    __slots__ = ("checkpoints",)
    CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    checkpoints: _containers.RepeatedCompositeFieldContainer[Checkpoint]
    def __init__(self, checkpoints: _Optional[_Iterable[_Union[Checkpoint, _Mapping]]] = ...) -> None: ...

class LedgerRow(_message.Message):
    __slots__ = ("epoch", "ingested", "tasks", "conserved")
    class TasksEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    INGESTED_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    CONSERVED_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    ingested: int
    tasks: _containers.ScalarMap[str, int]
    conserved: bool
    def __init__(self, epoch: _Optional[int] = ..., ingested: _Optional[int] = ..., tasks: _Optional[_Mapping[str, int]] = ..., conserved: _Optional[bool] = ...) -> None: ...

class VerifyLedgerRequest(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class VerifyLedgerResponse(_message.Message):
    __slots__ = ("run_id", "rows", "conserved", "trained_twice", "trained_never", "violations", "reserved_bytes", "outbox_open")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    CONSERVED_FIELD_NUMBER: _ClassVar[int]
    TRAINED_TWICE_FIELD_NUMBER: _ClassVar[int]
    TRAINED_NEVER_FIELD_NUMBER: _ClassVar[int]
    VIOLATIONS_FIELD_NUMBER: _ClassVar[int]
    RESERVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    OUTBOX_OPEN_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    rows: _containers.RepeatedCompositeFieldContainer[LedgerRow]
    conserved: bool
    trained_twice: int
    trained_never: int
    violations: _containers.RepeatedScalarFieldContainer[str]
    reserved_bytes: int
    outbox_open: int
    def __init__(self, run_id: _Optional[str] = ..., rows: _Optional[_Iterable[_Union[LedgerRow, _Mapping]]] = ..., conserved: _Optional[bool] = ..., trained_twice: _Optional[int] = ..., trained_never: _Optional[int] = ..., violations: _Optional[_Iterable[str]] = ..., reserved_bytes: _Optional[int] = ..., outbox_open: _Optional[int] = ...) -> None: ...

class ExplainSampleRequest(_message.Message):
    __slots__ = ("task",)
    TASK_FIELD_NUMBER: _ClassVar[int]
    task: _records_pb2.TaskKey
    def __init__(self, task: _Optional[_Union[_records_pb2.TaskKey, _Mapping]] = ...) -> None: ...

class ExplainSampleResponse(_message.Message):
    __slots__ = ("task", "state", "attempt", "reason", "history")
    TASK_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    task: _records_pb2.TaskKey
    state: str
    attempt: int
    reason: str
    history: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, task: _Optional[_Union[_records_pb2.TaskKey, _Mapping]] = ..., state: _Optional[str] = ..., attempt: _Optional[int] = ..., reason: _Optional[str] = ..., history: _Optional[_Iterable[str]] = ...) -> None: ...

class FleetMember(_message.Message):
    __slots__ = ("id", "kind", "state", "reason", "host", "last_seen_unix_ms", "contract_hash", "run_id", "numbers", "labels")
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
    ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    LAST_SEEN_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    CONTRACT_HASH_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    id: str
    kind: str
    state: str
    reason: str
    host: str
    last_seen_unix_ms: int
    contract_hash: str
    run_id: str
    numbers: _containers.ScalarMap[str, float]
    labels: _containers.ScalarMap[str, str]
    def __init__(self, id: _Optional[str] = ..., kind: _Optional[str] = ..., state: _Optional[str] = ..., reason: _Optional[str] = ..., host: _Optional[str] = ..., last_seen_unix_ms: _Optional[int] = ..., contract_hash: _Optional[str] = ..., run_id: _Optional[str] = ..., numbers: _Optional[_Mapping[str, float]] = ..., labels: _Optional[_Mapping[str, str]] = ...) -> None: ...

class ListFleetRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListFleetResponse(_message.Message):
    __slots__ = ("members",)
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    members: _containers.RepeatedCompositeFieldContainer[FleetMember]
    def __init__(self, members: _Optional[_Iterable[_Union[FleetMember, _Mapping]]] = ...) -> None: ...

class RecordGateReportRequest(_message.Message):
    __slots__ = ("run_id", "gate_id", "verdict", "report_json")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    GATE_ID_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    REPORT_JSON_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    gate_id: str
    verdict: str
    report_json: str
    def __init__(self, run_id: _Optional[str] = ..., gate_id: _Optional[str] = ..., verdict: _Optional[str] = ..., report_json: _Optional[str] = ...) -> None: ...

class RecordGateReportResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
