from google.protobuf import struct_pb2 as _struct_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP_TOKEN: _ClassVar[FinishReason]
    FINISH_REASON_STOP_SEQUENCE: _ClassVar[FinishReason]
    FINISH_REASON_STOP_STRING: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_ABORTED: _ClassVar[FinishReason]
    FINISH_REASON_DEADLINE: _ClassVar[FinishReason]
    FINISH_REASON_ERROR: _ClassVar[FinishReason]

class PoolTask(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    POOL_TASK_UNSPECIFIED: _ClassVar[PoolTask]
    POOL_TASK_EMBED: _ClassVar[PoolTask]
    POOL_TASK_CLASSIFY: _ClassVar[PoolTask]
    POOL_TASK_SCORE: _ClassVar[PoolTask]

class PoolingKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    POOLING_KIND_UNSPECIFIED: _ClassVar[PoolingKind]
    POOLING_KIND_MEAN: _ClassVar[PoolingKind]
    POOLING_KIND_LAST: _ClassVar[PoolingKind]
    POOLING_KIND_CLS: _ClassVar[PoolingKind]

class AbortOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ABORT_OUTCOME_UNSPECIFIED: _ClassVar[AbortOutcome]
    ABORT_OUTCOME_ABORTED: _ClassVar[AbortOutcome]
    ABORT_OUTCOME_ALREADY_DONE: _ClassVar[AbortOutcome]
    ABORT_OUTCOME_UNKNOWN: _ClassVar[AbortOutcome]

class EngineRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ENGINE_ROLE_UNSPECIFIED: _ClassVar[EngineRole]
    ENGINE_ROLE_BOTH: _ClassVar[EngineRole]
    ENGINE_ROLE_PREFILL: _ClassVar[EngineRole]
    ENGINE_ROLE_DECODE: _ClassVar[EngineRole]

class EngineState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ENGINE_STATE_UNSPECIFIED: _ClassVar[EngineState]
    ENGINE_STATE_UNINITIALIZED: _ClassVar[EngineState]
    ENGINE_STATE_LOADING: _ClassVar[EngineState]
    ENGINE_STATE_READY: _ClassVar[EngineState]
    ENGINE_STATE_BUSY: _ClassVar[EngineState]
    ENGINE_STATE_DRAINING: _ClassVar[EngineState]
    ENGINE_STATE_SHUTDOWN: _ClassVar[EngineState]
    ENGINE_STATE_ERROR: _ClassVar[EngineState]

class PauseMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PAUSE_MODE_UNSPECIFIED: _ClassVar[PauseMode]
    PAUSE_MODE_ABORT: _ClassVar[PauseMode]
    PAUSE_MODE_WAIT: _ClassVar[PauseMode]
    PAUSE_MODE_KEEP: _ClassVar[PauseMode]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP_TOKEN: FinishReason
FINISH_REASON_STOP_SEQUENCE: FinishReason
FINISH_REASON_STOP_STRING: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_ABORTED: FinishReason
FINISH_REASON_DEADLINE: FinishReason
FINISH_REASON_ERROR: FinishReason
POOL_TASK_UNSPECIFIED: PoolTask
POOL_TASK_EMBED: PoolTask
POOL_TASK_CLASSIFY: PoolTask
POOL_TASK_SCORE: PoolTask
POOLING_KIND_UNSPECIFIED: PoolingKind
POOLING_KIND_MEAN: PoolingKind
POOLING_KIND_LAST: PoolingKind
POOLING_KIND_CLS: PoolingKind
ABORT_OUTCOME_UNSPECIFIED: AbortOutcome
ABORT_OUTCOME_ABORTED: AbortOutcome
ABORT_OUTCOME_ALREADY_DONE: AbortOutcome
ABORT_OUTCOME_UNKNOWN: AbortOutcome
ENGINE_ROLE_UNSPECIFIED: EngineRole
ENGINE_ROLE_BOTH: EngineRole
ENGINE_ROLE_PREFILL: EngineRole
ENGINE_ROLE_DECODE: EngineRole
ENGINE_STATE_UNSPECIFIED: EngineState
ENGINE_STATE_UNINITIALIZED: EngineState
ENGINE_STATE_LOADING: EngineState
ENGINE_STATE_READY: EngineState
ENGINE_STATE_BUSY: EngineState
ENGINE_STATE_DRAINING: EngineState
ENGINE_STATE_SHUTDOWN: EngineState
ENGINE_STATE_ERROR: EngineState
PAUSE_MODE_UNSPECIFIED: PauseMode
PAUSE_MODE_ABORT: PauseMode
PAUSE_MODE_WAIT: PauseMode
PAUSE_MODE_KEEP: PauseMode

class SessionRequest(_message.Message):
    __slots__ = ("hello", "submit", "abort", "stop_matched", "ping")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    STOP_MATCHED_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    submit: Submit
    abort: AbortHandles
    stop_matched: StopMatched
    ping: Ping
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., submit: _Optional[_Union[Submit, _Mapping]] = ..., abort: _Optional[_Union[AbortHandles, _Mapping]] = ..., stop_matched: _Optional[_Union[StopMatched, _Mapping]] = ..., ping: _Optional[_Union[Ping, _Mapping]] = ...) -> None: ...

class SessionResponse(_message.Message):
    __slots__ = ("hello_ack", "step", "failed", "draining", "load_report", "pong")
    HELLO_ACK_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    LOAD_REPORT_FIELD_NUMBER: _ClassVar[int]
    PONG_FIELD_NUMBER: _ClassVar[int]
    hello_ack: HelloAck
    step: Step
    failed: Failed
    draining: Draining
    load_report: LoadReport
    pong: Pong
    def __init__(self, hello_ack: _Optional[_Union[HelloAck, _Mapping]] = ..., step: _Optional[_Union[Step, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ..., draining: _Optional[_Union[Draining, _Mapping]] = ..., load_report: _Optional[_Union[LoadReport, _Mapping]] = ..., pong: _Optional[_Union[Pong, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol_major", "protocol_minor", "features", "client_version", "client_name")
    PROTOCOL_MAJOR_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_MINOR_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    CLIENT_VERSION_FIELD_NUMBER: _ClassVar[int]
    CLIENT_NAME_FIELD_NUMBER: _ClassVar[int]
    protocol_major: int
    protocol_minor: int
    features: _containers.RepeatedScalarFieldContainer[str]
    client_version: str
    client_name: str
    def __init__(self, protocol_major: _Optional[int] = ..., protocol_minor: _Optional[int] = ..., features: _Optional[_Iterable[str]] = ..., client_version: _Optional[str] = ..., client_name: _Optional[str] = ...) -> None: ...

class HelloAck(_message.Message):
    __slots__ = ("protocol_major", "protocol_minor", "features", "instance_id", "model_id", "weight_version", "tokenizer_sha256", "limits")
    PROTOCOL_MAJOR_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_MINOR_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_SHA256_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    protocol_major: int
    protocol_minor: int
    features: _containers.RepeatedScalarFieldContainer[str]
    instance_id: str
    model_id: str
    weight_version: str
    tokenizer_sha256: str
    limits: EngineLimits
    def __init__(self, protocol_major: _Optional[int] = ..., protocol_minor: _Optional[int] = ..., features: _Optional[_Iterable[str]] = ..., instance_id: _Optional[str] = ..., model_id: _Optional[str] = ..., weight_version: _Optional[str] = ..., tokenizer_sha256: _Optional[str] = ..., limits: _Optional[_Union[EngineLimits, _Mapping]] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("handle", "spec")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    handle: int
    spec: GenerateSpec
    def __init__(self, handle: _Optional[int] = ..., spec: _Optional[_Union[GenerateSpec, _Mapping]] = ...) -> None: ...

class GenerateSpec(_message.Message):
    __slots__ = ("request_id", "prompt_token_ids", "sampling", "decoding", "stop", "logprobs", "constraint", "adapter", "cache_salt", "priority", "fairness_key", "timeout_ms", "dp_rank", "kv_transfer", "media", "traceparent", "tracestate", "prompt_digest", "group", "choice", "emit_canvas", "pinned", "reasoning", "kv_source")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    DECODING_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    FAIRNESS_KEY_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    DP_RANK_FIELD_NUMBER: _ClassVar[int]
    KV_TRANSFER_FIELD_NUMBER: _ClassVar[int]
    MEDIA_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    TRACESTATE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    EMIT_CANVAS_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    KV_SOURCE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt_token_ids: bytes
    sampling: SamplingParams
    decoding: DecodingSpec
    stop: StopSpec
    logprobs: LogprobsSpec
    constraint: Constraint
    adapter: str
    cache_salt: str
    priority: int
    fairness_key: str
    timeout_ms: int
    dp_rank: int
    kv_transfer: _struct_pb2.Struct
    media: _containers.RepeatedCompositeFieldContainer[MediaItem]
    traceparent: str
    tracestate: str
    prompt_digest: bytes
    group: str
    choice: int
    emit_canvas: bool
    pinned: _containers.RepeatedCompositeFieldContainer[PinnedToken]
    reasoning: Reasoning
    kv_source: KvSource
    def __init__(self, request_id: _Optional[str] = ..., prompt_token_ids: _Optional[bytes] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., decoding: _Optional[_Union[DecodingSpec, _Mapping]] = ..., stop: _Optional[_Union[StopSpec, _Mapping]] = ..., logprobs: _Optional[_Union[LogprobsSpec, _Mapping]] = ..., constraint: _Optional[_Union[Constraint, _Mapping]] = ..., adapter: _Optional[str] = ..., cache_salt: _Optional[str] = ..., priority: _Optional[int] = ..., fairness_key: _Optional[str] = ..., timeout_ms: _Optional[int] = ..., dp_rank: _Optional[int] = ..., kv_transfer: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ..., media: _Optional[_Iterable[_Union[MediaItem, _Mapping]]] = ..., traceparent: _Optional[str] = ..., tracestate: _Optional[str] = ..., prompt_digest: _Optional[bytes] = ..., group: _Optional[str] = ..., choice: _Optional[int] = ..., emit_canvas: _Optional[bool] = ..., pinned: _Optional[_Iterable[_Union[PinnedToken, _Mapping]]] = ..., reasoning: _Optional[_Union[Reasoning, _Mapping]] = ..., kv_source: _Optional[_Union[KvSource, _Mapping]] = ...) -> None: ...

class KvSource(_message.Message):
    __slots__ = ("address",)
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    address: str
    def __init__(self, address: _Optional[str] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "seed", "max_tokens", "min_tokens", "allowed_token_ids", "bad_words")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    seed: int
    max_tokens: int
    min_tokens: int
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bad_words: _containers.RepeatedCompositeFieldContainer[TokenSequence]
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., seed: _Optional[int] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., bad_words: _Optional[_Iterable[_Union[TokenSequence, _Mapping]]] = ...) -> None: ...

class DecodingSpec(_message.Message):
    __slots__ = ("method", "params")
    METHOD_FIELD_NUMBER: _ClassVar[int]
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    method: str
    params: _struct_pb2.Struct
    def __init__(self, method: _Optional[str] = ..., params: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ...) -> None: ...

class StopSpec(_message.Message):
    __slots__ = ("token_ids", "token_sequences", "ignore_eos")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    token_sequences: _containers.RepeatedCompositeFieldContainer[TokenSequence]
    ignore_eos: bool
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., token_sequences: _Optional[_Iterable[_Union[TokenSequence, _Mapping]]] = ..., ignore_eos: _Optional[bool] = ...) -> None: ...

class TokenSequence(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class PinnedToken(_message.Message):
    __slots__ = ("position", "token_id")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    position: int
    token_id: int
    def __init__(self, position: _Optional[int] = ..., token_id: _Optional[int] = ...) -> None: ...

class LogprobsSpec(_message.Message):
    __slots__ = ("top", "prompt_top")
    TOP_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOP_FIELD_NUMBER: _ClassVar[int]
    top: int
    prompt_top: int
    def __init__(self, top: _Optional[int] = ..., prompt_top: _Optional[int] = ...) -> None: ...

class Constraint(_message.Message):
    __slots__ = ("json_schema", "json_object", "regex", "choice", "ebnf", "structural_tag")
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    JSON_OBJECT_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    EBNF_FIELD_NUMBER: _ClassVar[int]
    STRUCTURAL_TAG_FIELD_NUMBER: _ClassVar[int]
    json_schema: str
    json_object: bool
    regex: str
    choice: Choices
    ebnf: str
    structural_tag: str
    def __init__(self, json_schema: _Optional[str] = ..., json_object: _Optional[bool] = ..., regex: _Optional[str] = ..., choice: _Optional[_Union[Choices, _Mapping]] = ..., ebnf: _Optional[str] = ..., structural_tag: _Optional[str] = ...) -> None: ...

class Reasoning(_message.Message):
    __slots__ = ("start", "end", "lark")
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    LARK_FIELD_NUMBER: _ClassVar[int]
    start: str
    end: str
    lark: str
    def __init__(self, start: _Optional[str] = ..., end: _Optional[str] = ..., lark: _Optional[str] = ...) -> None: ...

class Choices(_message.Message):
    __slots__ = ("values",)
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, values: _Optional[_Iterable[str]] = ...) -> None: ...

class MediaItem(_message.Message):
    __slots__ = ("shape", "dtype", "inline", "shared_memory", "remote_uri", "sha256", "placeholder_start", "placeholder_len")
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    INLINE_FIELD_NUMBER: _ClassVar[int]
    SHARED_MEMORY_FIELD_NUMBER: _ClassVar[int]
    REMOTE_URI_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    PLACEHOLDER_START_FIELD_NUMBER: _ClassVar[int]
    PLACEHOLDER_LEN_FIELD_NUMBER: _ClassVar[int]
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    inline: bytes
    shared_memory: str
    remote_uri: str
    sha256: bytes
    placeholder_start: int
    placeholder_len: int
    def __init__(self, shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ..., inline: _Optional[bytes] = ..., shared_memory: _Optional[str] = ..., remote_uri: _Optional[str] = ..., sha256: _Optional[bytes] = ..., placeholder_start: _Optional[int] = ..., placeholder_len: _Optional[int] = ...) -> None: ...

class AbortHandles(_message.Message):
    __slots__ = ("handles",)
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    handles: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, handles: _Optional[_Iterable[int]] = ...) -> None: ...

class StopMatched(_message.Message):
    __slots__ = ("handle", "completion_tokens", "stop_string")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    handle: int
    completion_tokens: int
    stop_string: str
    def __init__(self, handle: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., stop_string: _Optional[str] = ...) -> None: ...

class Ping(_message.Message):
    __slots__ = ("nonce",)
    NONCE_FIELD_NUMBER: _ClassVar[int]
    nonce: int
    def __init__(self, nonce: _Optional[int] = ...) -> None: ...

class Pong(_message.Message):
    __slots__ = ("nonce",)
    NONCE_FIELD_NUMBER: _ClassVar[int]
    nonce: int
    def __init__(self, nonce: _Optional[int] = ...) -> None: ...

class Step(_message.Message):
    __slots__ = ("step_seq", "t_unix_ns", "handles", "counts", "token_ids", "logprobs", "finished", "canvas", "prompt_logprobs")
    STEP_SEQ_FIELD_NUMBER: _ClassVar[int]
    T_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    CANVAS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    step_seq: int
    t_unix_ns: int
    handles: _containers.RepeatedScalarFieldContainer[int]
    counts: _containers.RepeatedScalarFieldContainer[int]
    token_ids: bytes
    logprobs: _containers.RepeatedCompositeFieldContainer[RowLogprobs]
    finished: _containers.RepeatedCompositeFieldContainer[FinishedRow]
    canvas: _containers.RepeatedCompositeFieldContainer[CanvasRow]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[RowPromptLogprobs]
    def __init__(self, step_seq: _Optional[int] = ..., t_unix_ns: _Optional[int] = ..., handles: _Optional[_Iterable[int]] = ..., counts: _Optional[_Iterable[int]] = ..., token_ids: _Optional[bytes] = ..., logprobs: _Optional[_Iterable[_Union[RowLogprobs, _Mapping]]] = ..., finished: _Optional[_Iterable[_Union[FinishedRow, _Mapping]]] = ..., canvas: _Optional[_Iterable[_Union[CanvasRow, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[RowPromptLogprobs, _Mapping]]] = ...) -> None: ...

class RowLogprobs(_message.Message):
    __slots__ = ("row", "positions")
    ROW_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    row: int
    positions: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    def __init__(self, row: _Optional[int] = ..., positions: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ...) -> None: ...

class RowPromptLogprobs(_message.Message):
    __slots__ = ("row", "start", "positions")
    ROW_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    row: int
    start: int
    positions: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    def __init__(self, row: _Optional[int] = ..., start: _Optional[int] = ..., positions: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("token_ids", "logprobs", "rank")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    rank: int
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ..., rank: _Optional[int] = ...) -> None: ...

class FinishedRow(_message.Message):
    __slots__ = ("row", "finish")
    ROW_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    row: int
    finish: Finish
    def __init__(self, row: _Optional[int] = ..., finish: _Optional[_Union[Finish, _Mapping]] = ...) -> None: ...

class Finish(_message.Message):
    __slots__ = ("reason", "stop_token_id", "detail", "usage", "timings", "dead_end")
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    DEAD_END_FIELD_NUMBER: _ClassVar[int]
    reason: FinishReason
    stop_token_id: int
    detail: str
    usage: Usage
    timings: Timings
    dead_end: bool
    def __init__(self, reason: _Optional[_Union[FinishReason, str]] = ..., stop_token_id: _Optional[int] = ..., detail: _Optional[str] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ..., dead_end: _Optional[bool] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "cached_tokens", "output_tokens", "reasoning_tokens", "forward_passes", "denoise_steps", "preemptions", "tokens_per_forward")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REASONING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FORWARD_PASSES_FIELD_NUMBER: _ClassVar[int]
    DENOISE_STEPS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_FORWARD_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    reasoning_tokens: int
    forward_passes: int
    denoise_steps: int
    preemptions: int
    tokens_per_forward: float
    def __init__(self, prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., reasoning_tokens: _Optional[int] = ..., forward_passes: _Optional[int] = ..., denoise_steps: _Optional[int] = ..., preemptions: _Optional[int] = ..., tokens_per_forward: _Optional[float] = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ("arrival_unix_ns", "queue_ns", "prefill_ns", "decode_ns")
    ARRIVAL_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_NS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_NS_FIELD_NUMBER: _ClassVar[int]
    DECODE_NS_FIELD_NUMBER: _ClassVar[int]
    arrival_unix_ns: int
    queue_ns: int
    prefill_ns: int
    decode_ns: int
    def __init__(self, arrival_unix_ns: _Optional[int] = ..., queue_ns: _Optional[int] = ..., prefill_ns: _Optional[int] = ..., decode_ns: _Optional[int] = ...) -> None: ...

class CanvasRow(_message.Message):
    __slots__ = ("row", "block_start", "token_ids", "fixed", "denoise_step", "confidence", "block")
    ROW_FIELD_NUMBER: _ClassVar[int]
    BLOCK_START_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FIXED_FIELD_NUMBER: _ClassVar[int]
    DENOISE_STEP_FIELD_NUMBER: _ClassVar[int]
    CONFIDENCE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    row: int
    block_start: int
    token_ids: bytes
    fixed: bytes
    denoise_step: int
    confidence: _containers.RepeatedScalarFieldContainer[float]
    block: int
    def __init__(self, row: _Optional[int] = ..., block_start: _Optional[int] = ..., token_ids: _Optional[bytes] = ..., fixed: _Optional[bytes] = ..., denoise_step: _Optional[int] = ..., confidence: _Optional[_Iterable[float]] = ..., block: _Optional[int] = ...) -> None: ...

class Failed(_message.Message):
    __slots__ = ("handle", "code", "message", "reason", "param", "retriable", "retry_after_ms", "metadata")
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    PARAM_FIELD_NUMBER: _ClassVar[int]
    RETRIABLE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    handle: int
    code: int
    message: str
    reason: str
    param: str
    retriable: bool
    retry_after_ms: int
    metadata: _containers.ScalarMap[str, str]
    def __init__(self, handle: _Optional[int] = ..., code: _Optional[int] = ..., message: _Optional[str] = ..., reason: _Optional[str] = ..., param: _Optional[str] = ..., retriable: _Optional[bool] = ..., retry_after_ms: _Optional[int] = ..., metadata: _Optional[_Mapping[str, str]] = ...) -> None: ...

class Draining(_message.Message):
    __slots__ = ("deadline_ms",)
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    deadline_ms: int
    def __init__(self, deadline_ms: _Optional[int] = ...) -> None: ...

class LoadReport(_message.Message):
    __slots__ = ("load", "engine_silence_ms", "stalled", "state", "memory_used_bytes", "memory_total_bytes", "submits", "paused")
    LOAD_FIELD_NUMBER: _ClassVar[int]
    ENGINE_SILENCE_MS_FIELD_NUMBER: _ClassVar[int]
    STALLED_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    SUBMITS_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    load: Load
    engine_silence_ms: int
    stalled: bool
    state: EngineState
    memory_used_bytes: int
    memory_total_bytes: int
    submits: int
    paused: bool
    def __init__(self, load: _Optional[_Union[Load, _Mapping]] = ..., engine_silence_ms: _Optional[int] = ..., stalled: _Optional[bool] = ..., state: _Optional[_Union[EngineState, str]] = ..., memory_used_bytes: _Optional[int] = ..., memory_total_bytes: _Optional[int] = ..., submits: _Optional[int] = ..., paused: _Optional[bool] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("running", "waiting", "pages_used", "pages_total", "waiting_tokens", "steps", "host_ns")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    PAGES_USED_FIELD_NUMBER: _ClassVar[int]
    PAGES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    HOST_NS_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    pages_used: int
    pages_total: int
    waiting_tokens: int
    steps: int
    host_ns: int
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., pages_used: _Optional[int] = ..., pages_total: _Optional[int] = ..., waiting_tokens: _Optional[int] = ..., steps: _Optional[int] = ..., host_ns: _Optional[int] = ...) -> None: ...

class EngineLimits(_message.Message):
    __slots__ = ("max_model_len", "max_rows", "max_queued_requests", "vocab_size", "max_logprobs", "max_message_bytes")
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_ROWS_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    max_model_len: int
    max_rows: int
    max_queued_requests: int
    vocab_size: int
    max_logprobs: int
    max_message_bytes: int
    def __init__(self, max_model_len: _Optional[int] = ..., max_rows: _Optional[int] = ..., max_queued_requests: _Optional[int] = ..., vocab_size: _Optional[int] = ..., max_logprobs: _Optional[int] = ..., max_message_bytes: _Optional[int] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("spec", "n")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    spec: GenerateSpec
    n: int
    def __init__(self, spec: _Optional[_Union[GenerateSpec, _Mapping]] = ..., n: _Optional[int] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("index", "token_ids", "logprobs", "prompt_logprobs", "prompt_logprobs_start", "canvas", "finish")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_START_FIELD_NUMBER: _ClassVar[int]
    CANVAS_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    index: int
    token_ids: bytes
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    prompt_logprobs_start: int
    canvas: CanvasRow
    finish: Finish
    def __init__(self, index: _Optional[int] = ..., token_ids: _Optional[bytes] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., prompt_logprobs_start: _Optional[int] = ..., canvas: _Optional[_Union[CanvasRow, _Mapping]] = ..., finish: _Optional[_Union[Finish, _Mapping]] = ...) -> None: ...

class PoolRequest(_message.Message):
    __slots__ = ("request_id", "prompt_token_ids", "task", "pooling", "normalize", "dimensions", "adapter", "timeout_ms", "pair_start", "traceparent", "tracestate", "priority")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    NORMALIZE_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    PAIR_START_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    TRACESTATE_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt_token_ids: bytes
    task: PoolTask
    pooling: PoolingKind
    normalize: bool
    dimensions: int
    adapter: str
    timeout_ms: int
    pair_start: int
    traceparent: str
    tracestate: str
    priority: int
    def __init__(self, request_id: _Optional[str] = ..., prompt_token_ids: _Optional[bytes] = ..., task: _Optional[_Union[PoolTask, str]] = ..., pooling: _Optional[_Union[PoolingKind, str]] = ..., normalize: _Optional[bool] = ..., dimensions: _Optional[int] = ..., adapter: _Optional[str] = ..., timeout_ms: _Optional[int] = ..., pair_start: _Optional[int] = ..., traceparent: _Optional[str] = ..., tracestate: _Optional[str] = ..., priority: _Optional[int] = ...) -> None: ...

class PoolResponse(_message.Message):
    __slots__ = ("values", "usage")
    VALUES_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedScalarFieldContainer[float]
    usage: Usage
    def __init__(self, values: _Optional[_Iterable[float]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("request_ids", "all_of_session")
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    ALL_OF_SESSION_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    all_of_session: str
    def __init__(self, request_ids: _Optional[_Iterable[str]] = ..., all_of_session: _Optional[str] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ("outcomes",)
    class OutcomesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: AbortOutcome
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[AbortOutcome, str]] = ...) -> None: ...
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    outcomes: _containers.ScalarMap[str, AbortOutcome]
    def __init__(self, outcomes: _Optional[_Mapping[str, AbortOutcome]] = ...) -> None: ...

class GetEngineInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetEngineInfoResponse(_message.Message):
    __slots__ = ("instance_id", "model_id", "weight_version", "architecture", "engine_version", "tokenizer_sha256", "limits", "decoding", "cache", "dtype", "device", "tensor_parallel_size", "adapters", "features", "default_sampling", "eos_token_ids", "started_unix_ns", "pooling", "role", "pipeline_parallel_size", "expert_parallel")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_VERSION_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_SHA256_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    DECODING_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_SAMPLING_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    STARTED_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    EXPERT_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    model_id: str
    weight_version: str
    architecture: str
    engine_version: str
    tokenizer_sha256: str
    limits: EngineLimits
    decoding: DecodingInfo
    cache: CacheInfo
    dtype: str
    device: str
    tensor_parallel_size: int
    adapters: _containers.RepeatedScalarFieldContainer[str]
    features: _containers.RepeatedScalarFieldContainer[str]
    default_sampling: SamplingParams
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    started_unix_ns: int
    pooling: PoolingInfo
    role: EngineRole
    pipeline_parallel_size: int
    expert_parallel: bool
    def __init__(self, instance_id: _Optional[str] = ..., model_id: _Optional[str] = ..., weight_version: _Optional[str] = ..., architecture: _Optional[str] = ..., engine_version: _Optional[str] = ..., tokenizer_sha256: _Optional[str] = ..., limits: _Optional[_Union[EngineLimits, _Mapping]] = ..., decoding: _Optional[_Union[DecodingInfo, _Mapping]] = ..., cache: _Optional[_Union[CacheInfo, _Mapping]] = ..., dtype: _Optional[str] = ..., device: _Optional[str] = ..., tensor_parallel_size: _Optional[int] = ..., adapters: _Optional[_Iterable[str]] = ..., features: _Optional[_Iterable[str]] = ..., default_sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., started_unix_ns: _Optional[int] = ..., pooling: _Optional[_Union[PoolingInfo, _Mapping]] = ..., role: _Optional[_Union[EngineRole, str]] = ..., pipeline_parallel_size: _Optional[int] = ..., expert_parallel: _Optional[bool] = ...) -> None: ...

class PoolingInfo(_message.Message):
    __slots__ = ("tasks", "default_pooling", "dimensions", "num_labels")
    TASKS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_POOLING_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_LABELS_FIELD_NUMBER: _ClassVar[int]
    tasks: _containers.RepeatedScalarFieldContainer[PoolTask]
    default_pooling: PoolingKind
    dimensions: int
    num_labels: int
    def __init__(self, tasks: _Optional[_Iterable[_Union[PoolTask, str]]] = ..., default_pooling: _Optional[_Union[PoolingKind, str]] = ..., dimensions: _Optional[int] = ..., num_labels: _Optional[int] = ...) -> None: ...

class DecodingInfo(_message.Message):
    __slots__ = ("default_method", "methods", "block_length", "mask_token_id", "default_params", "approximate_caches")
    DEFAULT_METHOD_FIELD_NUMBER: _ClassVar[int]
    METHODS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_LENGTH_FIELD_NUMBER: _ClassVar[int]
    MASK_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_PARAMS_FIELD_NUMBER: _ClassVar[int]
    APPROXIMATE_CACHES_FIELD_NUMBER: _ClassVar[int]
    default_method: str
    methods: _containers.RepeatedScalarFieldContainer[str]
    block_length: int
    mask_token_id: int
    default_params: _struct_pb2.Struct
    approximate_caches: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, default_method: _Optional[str] = ..., methods: _Optional[_Iterable[str]] = ..., block_length: _Optional[int] = ..., mask_token_id: _Optional[int] = ..., default_params: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ..., approximate_caches: _Optional[_Iterable[str]] = ...) -> None: ...

class CacheInfo(_message.Message):
    __slots__ = ("page_size", "num_pages", "prefix_caching")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHING_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    num_pages: int
    prefix_caching: bool
    def __init__(self, page_size: _Optional[int] = ..., num_pages: _Optional[int] = ..., prefix_caching: _Optional[bool] = ...) -> None: ...

class GetTokenizerRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetTokenizerResponse(_message.Message):
    __slots__ = ("manifest", "chunk")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    manifest: TokenizerManifest
    chunk: TokenizerChunk
    def __init__(self, manifest: _Optional[_Union[TokenizerManifest, _Mapping]] = ..., chunk: _Optional[_Union[TokenizerChunk, _Mapping]] = ...) -> None: ...

class TokenizerManifest(_message.Message):
    __slots__ = ("sha256", "files")
    SHA256_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    sha256: str
    files: _containers.RepeatedCompositeFieldContainer[TokenizerFile]
    def __init__(self, sha256: _Optional[str] = ..., files: _Optional[_Iterable[_Union[TokenizerFile, _Mapping]]] = ...) -> None: ...

class TokenizerFile(_message.Message):
    __slots__ = ("name", "size")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    name: str
    size: int
    def __init__(self, name: _Optional[str] = ..., size: _Optional[int] = ...) -> None: ...

class TokenizerChunk(_message.Message):
    __slots__ = ("file", "content")
    FILE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    file: int
    content: bytes
    def __init__(self, file: _Optional[int] = ..., content: _Optional[bytes] = ...) -> None: ...

class WatchStateRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchStateResponse(_message.Message):
    __slots__ = ("revision", "state", "paused", "detail", "load", "adapters")
    REVISION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    revision: int
    state: EngineState
    paused: bool
    detail: str
    load: Load
    adapters: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, revision: _Optional[int] = ..., state: _Optional[_Union[EngineState, str]] = ..., paused: _Optional[bool] = ..., detail: _Optional[str] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., adapters: _Optional[_Iterable[str]] = ...) -> None: ...

class SubscribeRequest(_message.Message):
    __slots__ = ("start_seq",)
    START_SEQ_FIELD_NUMBER: _ClassVar[int]
    start_seq: int
    def __init__(self, start_seq: _Optional[int] = ...) -> None: ...

class SubscribeResponse(_message.Message):
    __slots__ = ("seq", "gap", "snapshot", "dp_rank", "events")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    GAP_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    DP_RANK_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    seq: int
    gap: bool
    snapshot: bool
    dp_rank: int
    events: _containers.RepeatedCompositeFieldContainer[KvEvent]
    def __init__(self, seq: _Optional[int] = ..., gap: _Optional[bool] = ..., snapshot: _Optional[bool] = ..., dp_rank: _Optional[int] = ..., events: _Optional[_Iterable[_Union[KvEvent, _Mapping]]] = ...) -> None: ...

class KvEvent(_message.Message):
    __slots__ = ("stored", "removed", "cleared")
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    CLEARED_FIELD_NUMBER: _ClassVar[int]
    stored: PagesStored
    removed: PagesRemoved
    cleared: CacheCleared
    def __init__(self, stored: _Optional[_Union[PagesStored, _Mapping]] = ..., removed: _Optional[_Union[PagesRemoved, _Mapping]] = ..., cleared: _Optional[_Union[CacheCleared, _Mapping]] = ...) -> None: ...

class PagesStored(_message.Message):
    __slots__ = ("page_hashes", "parent_hash", "token_ids", "page_size", "adapter", "cache_salt", "tier")
    PAGE_HASHES_FIELD_NUMBER: _ClassVar[int]
    PARENT_HASH_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    page_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    parent_hash: bytes
    token_ids: bytes
    page_size: int
    adapter: str
    cache_salt: str
    tier: str
    def __init__(self, page_hashes: _Optional[_Iterable[bytes]] = ..., parent_hash: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ..., page_size: _Optional[int] = ..., adapter: _Optional[str] = ..., cache_salt: _Optional[str] = ..., tier: _Optional[str] = ...) -> None: ...

class PagesRemoved(_message.Message):
    __slots__ = ("page_hashes", "tier")
    PAGE_HASHES_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    page_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    tier: str
    def __init__(self, page_hashes: _Optional[_Iterable[bytes]] = ..., tier: _Optional[str] = ...) -> None: ...

class CacheCleared(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TransferRequest(_message.Message):
    __slots__ = ("open", "taken")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    open: TransferOpen
    taken: PieceTaken
    def __init__(self, open: _Optional[_Union[TransferOpen, _Mapping]] = ..., taken: _Optional[_Union[PieceTaken, _Mapping]] = ...) -> None: ...

class TransferOpen(_message.Message):
    __slots__ = ("request_id", "prompt_token_ids", "skip_tokens", "method", "cache_salt", "priority", "fairness_key", "layout", "shared_host", "traceparent", "tracestate")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SKIP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    FAIRNESS_KEY_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    SHARED_HOST_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    TRACESTATE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt_token_ids: bytes
    skip_tokens: int
    method: str
    cache_salt: str
    priority: int
    fairness_key: str
    layout: KvLayout
    shared_host: str
    traceparent: str
    tracestate: str
    def __init__(self, request_id: _Optional[str] = ..., prompt_token_ids: _Optional[bytes] = ..., skip_tokens: _Optional[int] = ..., method: _Optional[str] = ..., cache_salt: _Optional[str] = ..., priority: _Optional[int] = ..., fairness_key: _Optional[str] = ..., layout: _Optional[_Union[KvLayout, _Mapping]] = ..., shared_host: _Optional[str] = ..., traceparent: _Optional[str] = ..., tracestate: _Optional[str] = ...) -> None: ...

class PieceTaken(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class KvLayout(_message.Message):
    __slots__ = ("model_id", "weight_version", "dtype", "page_size", "num_layers", "num_kv_heads", "head_dim")
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    weight_version: str
    dtype: str
    page_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    def __init__(self, model_id: _Optional[str] = ..., weight_version: _Optional[str] = ..., dtype: _Optional[str] = ..., page_size: _Optional[int] = ..., num_layers: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ...) -> None: ...

class TransferResponse(_message.Message):
    __slots__ = ("piece",)
    PIECE_FIELD_NUMBER: _ClassVar[int]
    piece: KvPiece
    def __init__(self, piece: _Optional[_Union[KvPiece, _Mapping]] = ...) -> None: ...

class KvPiece(_message.Message):
    __slots__ = ("start", "num_tokens", "crc32", "inline", "shared")
    START_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CRC32_FIELD_NUMBER: _ClassVar[int]
    INLINE_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    start: int
    num_tokens: int
    crc32: int
    inline: bytes
    shared: SharedPiece
    def __init__(self, start: _Optional[int] = ..., num_tokens: _Optional[int] = ..., crc32: _Optional[int] = ..., inline: _Optional[bytes] = ..., shared: _Optional[_Union[SharedPiece, _Mapping]] = ...) -> None: ...

class SharedPiece(_message.Message):
    __slots__ = ("pid", "fd", "size", "stamp")
    PID_FIELD_NUMBER: _ClassVar[int]
    FD_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    STAMP_FIELD_NUMBER: _ClassVar[int]
    pid: int
    fd: int
    size: int
    stamp: int
    def __init__(self, pid: _Optional[int] = ..., fd: _Optional[int] = ..., size: _Optional[int] = ..., stamp: _Optional[int] = ...) -> None: ...

class LoadAdapterRequest(_message.Message):
    __slots__ = ("name", "path")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ...) -> None: ...

class LoadAdapterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class UnloadAdapterRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class UnloadAdapterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListAdaptersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListAdaptersResponse(_message.Message):
    __slots__ = ("names",)
    NAMES_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, names: _Optional[_Iterable[str]] = ...) -> None: ...

class FlushCacheRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FlushCacheResponse(_message.Message):
    __slots__ = ("pages_flushed",)
    PAGES_FLUSHED_FIELD_NUMBER: _ClassVar[int]
    pages_flushed: int
    def __init__(self, pages_flushed: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("timeout_ms",)
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    timeout_ms: int
    def __init__(self, timeout_ms: _Optional[int] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PauseRequest(_message.Message):
    __slots__ = ("mode",)
    MODE_FIELD_NUMBER: _ClassVar[int]
    mode: PauseMode
    def __init__(self, mode: _Optional[_Union[PauseMode, str]] = ...) -> None: ...

class PauseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StartProfileRequest(_message.Message):
    __slots__ = ("directory",)
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    directory: str
    def __init__(self, directory: _Optional[str] = ...) -> None: ...

class StartProfileResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StopProfileRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StopProfileResponse(_message.Message):
    __slots__ = ("files",)
    FILES_FIELD_NUMBER: _ClassVar[int]
    files: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, files: _Optional[_Iterable[str]] = ...) -> None: ...

class SetTraceLevelRequest(_message.Message):
    __slots__ = ("level",)
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    level: int
    def __init__(self, level: _Optional[int] = ...) -> None: ...

class SetTraceLevelResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
