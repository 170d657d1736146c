from specfleet.wire import records_pb2 as _records_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RegisterAgentRequest(_message.Message):
    __slots__ = ("agent_id", "host", "pid", "slots", "device", "versions")
    class VersionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    agent_id: str
    host: str
    pid: int
    slots: int
    device: str
    versions: _containers.ScalarMap[str, str]
    def __init__(self, agent_id: _Optional[str] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., slots: _Optional[int] = ..., device: _Optional[str] = ..., versions: _Optional[_Mapping[str, str]] = ...) -> None: ...

class RegisterAgentResponse(_message.Message):
    __slots__ = ("heartbeat_s",)
    HEARTBEAT_S_FIELD_NUMBER: _ClassVar[int]
    heartbeat_s: float
    def __init__(self, heartbeat_s: _Optional[float] = ...) -> None: ...

class Launch(_message.Message):
    __slots__ = ("run_id", "launch_id", "world", "nnodes", "node_rank", "nproc_per_node", "rendezvous", "config_yaml", "output_dir", "prompt_set_uri")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    LAUNCH_ID_FIELD_NUMBER: _ClassVar[int]
    WORLD_FIELD_NUMBER: _ClassVar[int]
    NNODES_FIELD_NUMBER: _ClassVar[int]
    NODE_RANK_FIELD_NUMBER: _ClassVar[int]
    NPROC_PER_NODE_FIELD_NUMBER: _ClassVar[int]
    RENDEZVOUS_FIELD_NUMBER: _ClassVar[int]
    CONFIG_YAML_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_DIR_FIELD_NUMBER: _ClassVar[int]
    PROMPT_SET_URI_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    launch_id: str
    world: int
    nnodes: int
    node_rank: int
    nproc_per_node: int
    rendezvous: str
    config_yaml: str
    output_dir: str
    prompt_set_uri: str
    def __init__(self, run_id: _Optional[str] = ..., launch_id: _Optional[str] = ..., world: _Optional[int] = ..., nnodes: _Optional[int] = ..., node_rank: _Optional[int] = ..., nproc_per_node: _Optional[int] = ..., rendezvous: _Optional[str] = ..., config_yaml: _Optional[str] = ..., output_dir: _Optional[str] = ..., prompt_set_uri: _Optional[str] = ...) -> None: ...

class LaunchStatus(_message.Message):
    __slots__ = ("run_id", "launch_id", "state", "exit_code", "message")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    LAUNCH_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    launch_id: str
    state: str
    exit_code: int
    message: str
    def __init__(self, run_id: _Optional[str] = ..., launch_id: _Optional[str] = ..., state: _Optional[str] = ..., exit_code: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...

class HeartbeatAgentRequest(_message.Message):
    __slots__ = ("agent_id", "launches")
    AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    LAUNCHES_FIELD_NUMBER: _ClassVar[int]
    agent_id: str
    launches: _containers.RepeatedCompositeFieldContainer[LaunchStatus]
    def __init__(self, agent_id: _Optional[str] = ..., launches: _Optional[_Iterable[_Union[LaunchStatus, _Mapping]]] = ...) -> None: ...

class HeartbeatAgentResponse(_message.Message):
    __slots__ = ("launches", "unknown")
    LAUNCHES_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    launches: _containers.RepeatedCompositeFieldContainer[Launch]
    unknown: bool
    def __init__(self, launches: _Optional[_Iterable[_Union[Launch, _Mapping]]] = ..., unknown: _Optional[bool] = ...) -> None: ...

class JoinRunRequest(_message.Message):
    __slots__ = ("run_id", "launch_id", "world", "rank", "agent_id", "identity")
    class IdentityEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    LAUNCH_ID_FIELD_NUMBER: _ClassVar[int]
    WORLD_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    launch_id: str
    world: int
    rank: int
    agent_id: str
    identity: _containers.ScalarMap[str, str]
    def __init__(self, run_id: _Optional[str] = ..., launch_id: _Optional[str] = ..., world: _Optional[int] = ..., rank: _Optional[int] = ..., agent_id: _Optional[str] = ..., identity: _Optional[_Mapping[str, str]] = ...) -> None: ...

class JoinRunResponse(_message.Message):
    __slots__ = ("generation", "checkpoint_uri", "checkpoint_digest", "restored_step", "total_steps", "contract", "store", "steps_subject")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_URI_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    RESTORED_STEP_FIELD_NUMBER: _ClassVar[int]
    TOTAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    CONTRACT_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    STEPS_SUBJECT_FIELD_NUMBER: _ClassVar[int]
    generation: int
    checkpoint_uri: str
    checkpoint_digest: str
    restored_step: int
    total_steps: int
    contract: _records_pb2.CaptureContract
    store: str
    steps_subject: str
    def __init__(self, generation: _Optional[int] = ..., checkpoint_uri: _Optional[str] = ..., checkpoint_digest: _Optional[str] = ..., restored_step: _Optional[int] = ..., total_steps: _Optional[int] = ..., contract: _Optional[_Union[_records_pb2.CaptureContract, _Mapping]] = ..., store: _Optional[str] = ..., steps_subject: _Optional[str] = ...) -> None: ...

class AckStepRequest(_message.Message):
    __slots__ = ("run_id", "generation", "step", "rank", "digest", "revision", "num_tokens", "num_loss_tokens", "metrics", "step_s", "wait_s")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOSS_TOKENS_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    generation: int
    step: int
    rank: int
    digest: str
    revision: int
    num_tokens: int
    num_loss_tokens: int
    metrics: _containers.ScalarMap[str, float]
    step_s: float
    wait_s: float
    def __init__(self, run_id: _Optional[str] = ..., generation: _Optional[int] = ..., step: _Optional[int] = ..., rank: _Optional[int] = ..., digest: _Optional[str] = ..., revision: _Optional[int] = ..., num_tokens: _Optional[int] = ..., num_loss_tokens: _Optional[int] = ..., metrics: _Optional[_Mapping[str, float]] = ..., step_s: _Optional[float] = ..., wait_s: _Optional[float] = ...) -> None: ...

class AckStepResponse(_message.Message):
    __slots__ = ("accepted", "current_generation")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    CURRENT_GENERATION_FIELD_NUMBER: _ClassVar[int]
    accepted: bool
    current_generation: int
    def __init__(self, accepted: _Optional[bool] = ..., current_generation: _Optional[int] = ...) -> None: ...

class ReportLostRequest(_message.Message):
    __slots__ = ("run_id", "generation", "step", "rank", "revision", "lost", "reason")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    generation: int
    step: int
    rank: int
    revision: int
    lost: _containers.RepeatedCompositeFieldContainer[_records_pb2.TaskAttempt]
    reason: str
    def __init__(self, run_id: _Optional[str] = ..., generation: _Optional[int] = ..., step: _Optional[int] = ..., rank: _Optional[int] = ..., revision: _Optional[int] = ..., lost: _Optional[_Iterable[_Union[_records_pb2.TaskAttempt, _Mapping]]] = ..., reason: _Optional[str] = ...) -> None: ...

class ReportLostResponse(_message.Message):
    __slots__ = ("accepted",)
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    accepted: bool
    def __init__(self, accepted: _Optional[bool] = ...) -> None: ...

class CommitCheckpointRequest(_message.Message):
    __slots__ = ("run_id", "generation", "step", "uri", "digest", "final")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    URI_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    FINAL_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    generation: int
    step: int
    uri: str
    digest: str
    final: bool
    def __init__(self, run_id: _Optional[str] = ..., generation: _Optional[int] = ..., step: _Optional[int] = ..., uri: _Optional[str] = ..., digest: _Optional[str] = ..., final: _Optional[bool] = ...) -> None: ...

class CommitCheckpointResponse(_message.Message):
    __slots__ = ("accepted",)
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    accepted: bool
    def __init__(self, accepted: _Optional[bool] = ...) -> None: ...

class DetachRunRequest(_message.Message):
    __slots__ = ("run_id", "generation", "rank", "reason")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    generation: int
    rank: int
    reason: str
    def __init__(self, run_id: _Optional[str] = ..., generation: _Optional[int] = ..., rank: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class DetachRunResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
