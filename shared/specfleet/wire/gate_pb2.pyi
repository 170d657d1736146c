from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ExportDraftRequest(_message.Message):
    __slots__ = ("checkpoint_uri", "layout", "output_dir", "untrained", "run_id")
    CHECKPOINT_URI_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_DIR_FIELD_NUMBER: _ClassVar[int]
    UNTRAINED_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    checkpoint_uri: str
    layout: str
    output_dir: str
    untrained: bool
    run_id: str
    def __init__(self, checkpoint_uri: _Optional[str] = ..., layout: _Optional[str] = ..., output_dir: _Optional[str] = ..., untrained: _Optional[bool] = ..., run_id: _Optional[str] = ...) -> None: ...

class ExportDraftResponse(_message.Message):
    __slots__ = ("output_dir", "files", "weights_hash")
    OUTPUT_DIR_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_HASH_FIELD_NUMBER: _ClassVar[int]
    output_dir: str
    files: _containers.RepeatedScalarFieldContainer[str]
    weights_hash: str
    def __init__(self, output_dir: _Optional[str] = ..., files: _Optional[_Iterable[str]] = ..., weights_hash: _Optional[str] = ...) -> None: ...

class StartGateRequest(_message.Message):
    __slots__ = ("run_id", "export_dir", "target", "eval_set_uri", "num_draft_tokens", "max_rows_per_source", "lossless_rows", "lossless_new_tokens", "baseline_export_dir", "output_dir", "require_improvement", "dtype", "temperature", "acceptance_rule", "serve_engine", "serve_rows", "serve_new_tokens", "top_k", "top_p")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    EXPORT_DIR_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    EVAL_SET_URI_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_ROWS_PER_SOURCE_FIELD_NUMBER: _ClassVar[int]
    LOSSLESS_ROWS_FIELD_NUMBER: _ClassVar[int]
    LOSSLESS_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BASELINE_EXPORT_DIR_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_DIR_FIELD_NUMBER: _ClassVar[int]
    REQUIRE_IMPROVEMENT_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_RULE_FIELD_NUMBER: _ClassVar[int]
    SERVE_ENGINE_FIELD_NUMBER: _ClassVar[int]
    SERVE_ROWS_FIELD_NUMBER: _ClassVar[int]
    SERVE_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    export_dir: str
    target: str
    eval_set_uri: str
    num_draft_tokens: int
    max_rows_per_source: int
    lossless_rows: int
    lossless_new_tokens: int
    baseline_export_dir: str
    output_dir: str
    require_improvement: bool
    dtype: str
    temperature: float
    acceptance_rule: str
    serve_engine: str
    serve_rows: int
    serve_new_tokens: int
    top_k: int
    top_p: float
    def __init__(self, run_id: _Optional[str] = ..., export_dir: _Optional[str] = ..., target: _Optional[str] = ..., eval_set_uri: _Optional[str] = ..., num_draft_tokens: _Optional[int] = ..., max_rows_per_source: _Optional[int] = ..., lossless_rows: _Optional[int] = ..., lossless_new_tokens: _Optional[int] = ..., baseline_export_dir: _Optional[str] = ..., output_dir: _Optional[str] = ..., require_improvement: _Optional[bool] = ..., dtype: _Optional[str] = ..., temperature: _Optional[float] = ..., acceptance_rule: _Optional[str] = ..., serve_engine: _Optional[str] = ..., serve_rows: _Optional[int] = ..., serve_new_tokens: _Optional[int] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ...) -> None: ...

class StartGateResponse(_message.Message):
    __slots__ = ("gate_id",)
    GATE_ID_FIELD_NUMBER: _ClassVar[int]
    gate_id: str
    def __init__(self, gate_id: _Optional[str] = ...) -> None: ...

class GateStatus(_message.Message):
    __slots__ = ("gate_id", "run_id", "state", "stage", "done", "total", "message", "report_json")
    GATE_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    REPORT_JSON_FIELD_NUMBER: _ClassVar[int]
    gate_id: str
    run_id: str
    state: str
    stage: str
    done: int
    total: int
    message: str
    report_json: str
    def __init__(self, gate_id: _Optional[str] = ..., run_id: _Optional[str] = ..., state: _Optional[str] = ..., stage: _Optional[str] = ..., done: _Optional[int] = ..., total: _Optional[int] = ..., message: _Optional[str] = ..., report_json: _Optional[str] = ...) -> None: ...

class GetGateRequest(_message.Message):
    __slots__ = ("gate_id",)
    GATE_ID_FIELD_NUMBER: _ClassVar[int]
    gate_id: str
    def __init__(self, gate_id: _Optional[str] = ...) -> None: ...

class GetGateResponse(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: GateStatus
    def __init__(self, status: _Optional[_Union[GateStatus, _Mapping]] = ...) -> None: ...

class WatchGateRequest(_message.Message):
    __slots__ = ("gate_id",)
    GATE_ID_FIELD_NUMBER: _ClassVar[int]
    gate_id: str
    def __init__(self, gate_id: _Optional[str] = ...) -> None: ...

class WatchGateResponse(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: GateStatus
    def __init__(self, status: _Optional[_Union[GateStatus, _Mapping]] = ...) -> None: ...
