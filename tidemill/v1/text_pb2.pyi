from google.protobuf import struct_pb2 as _struct_pb2
from tidemill.v1 import engine_pb2 as _engine_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TextOptions(_message.Message):
    __slots__ = ("model", "sampling", "decoding", "stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "add_special_tokens", "spaces_between_special_tokens", "n", "best_of", "logprobs", "constraint", "cache_salt", "truncate_prompt_tokens", "return_token_ids", "beam_search", "user", "emit_canvas", "truncation_side", "bad_words")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    DECODING_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_STR_IN_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ADD_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SPACES_BETWEEN_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    BEST_OF_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINT_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RETURN_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BEAM_SEARCH_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    EMIT_CANVAS_FIELD_NUMBER: _ClassVar[int]
    TRUNCATION_SIDE_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    model: str
    sampling: _engine_pb2.SamplingParams
    decoding: _engine_pb2.DecodingSpec
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    add_special_tokens: bool
    spaces_between_special_tokens: bool
    n: int
    best_of: int
    logprobs: _engine_pb2.LogprobsSpec
    constraint: _engine_pb2.Constraint
    cache_salt: str
    truncate_prompt_tokens: int
    return_token_ids: bool
    beam_search: BeamSearch
    user: str
    emit_canvas: bool
    truncation_side: str
    bad_words: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, model: _Optional[str] = ..., sampling: _Optional[_Union[_engine_pb2.SamplingParams, _Mapping]] = ..., decoding: _Optional[_Union[_engine_pb2.DecodingSpec, _Mapping]] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., include_stop_str_in_output: _Optional[bool] = ..., skip_special_tokens: _Optional[bool] = ..., add_special_tokens: _Optional[bool] = ..., spaces_between_special_tokens: _Optional[bool] = ..., n: _Optional[int] = ..., best_of: _Optional[int] = ..., logprobs: _Optional[_Union[_engine_pb2.LogprobsSpec, _Mapping]] = ..., constraint: _Optional[_Union[_engine_pb2.Constraint, _Mapping]] = ..., cache_salt: _Optional[str] = ..., truncate_prompt_tokens: _Optional[int] = ..., return_token_ids: _Optional[bool] = ..., beam_search: _Optional[_Union[BeamSearch, _Mapping]] = ..., user: _Optional[str] = ..., emit_canvas: _Optional[bool] = ..., truncation_side: _Optional[str] = ..., bad_words: _Optional[_Iterable[str]] = ...) -> None: ...

class BeamSearch(_message.Message):
    __slots__ = ("width", "length_penalty", "early_stopping")
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    LENGTH_PENALTY_FIELD_NUMBER: _ClassVar[int]
    EARLY_STOPPING_FIELD_NUMBER: _ClassVar[int]
    width: int
    length_penalty: float
    early_stopping: bool
    def __init__(self, width: _Optional[int] = ..., length_penalty: _Optional[float] = ..., early_stopping: _Optional[bool] = ...) -> None: ...

class Prompt(_message.Message):
    __slots__ = ("text", "tokens")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    text: str
    tokens: _engine_pb2.TokenSequence
    def __init__(self, text: _Optional[str] = ..., tokens: _Optional[_Union[_engine_pb2.TokenSequence, _Mapping]] = ...) -> None: ...

class TextServiceGenerateRequest(_message.Message):
    __slots__ = ("prompt", "options", "echo", "suffix")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    ECHO_FIELD_NUMBER: _ClassVar[int]
    SUFFIX_FIELD_NUMBER: _ClassVar[int]
    prompt: Prompt
    options: TextOptions
    echo: bool
    suffix: str
    def __init__(self, prompt: _Optional[_Union[Prompt, _Mapping]] = ..., options: _Optional[_Union[TextOptions, _Mapping]] = ..., echo: _Optional[bool] = ..., suffix: _Optional[str] = ...) -> None: ...

class TextServiceGenerateResponse(_message.Message):
    __slots__ = ("id", "model", "created_unix_s", "choices", "usage", "timings", "prompt_logprobs", "prompt_token_ids")
    ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    CREATED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    id: str
    model: str
    created_unix_s: int
    choices: _containers.RepeatedCompositeFieldContainer[TextChoice]
    usage: _engine_pb2.Usage
    timings: _engine_pb2.Timings
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[TextLogprobs]
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, id: _Optional[str] = ..., model: _Optional[str] = ..., created_unix_s: _Optional[int] = ..., choices: _Optional[_Iterable[_Union[TextChoice, _Mapping]]] = ..., usage: _Optional[_Union[_engine_pb2.Usage, _Mapping]] = ..., timings: _Optional[_Union[_engine_pb2.Timings, _Mapping]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[TextLogprobs, _Mapping]]] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class GenerateStreamRequest(_message.Message):
    __slots__ = ("prompt", "options", "echo", "suffix")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    ECHO_FIELD_NUMBER: _ClassVar[int]
    SUFFIX_FIELD_NUMBER: _ClassVar[int]
    prompt: Prompt
    options: TextOptions
    echo: bool
    suffix: str
    def __init__(self, prompt: _Optional[_Union[Prompt, _Mapping]] = ..., options: _Optional[_Union[TextOptions, _Mapping]] = ..., echo: _Optional[bool] = ..., suffix: _Optional[str] = ...) -> None: ...

class GenerateStreamResponse(_message.Message):
    __slots__ = ("id", "model", "created_unix_s", "choice", "usage", "timings", "canvas", "prompt_logprobs", "prompt_token_ids")
    ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    CREATED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    CANVAS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    id: str
    model: str
    created_unix_s: int
    choice: TextChoice
    usage: _engine_pb2.Usage
    timings: _engine_pb2.Timings
    canvas: CanvasEvent
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[TextLogprobs]
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, id: _Optional[str] = ..., model: _Optional[str] = ..., created_unix_s: _Optional[int] = ..., choice: _Optional[_Union[TextChoice, _Mapping]] = ..., usage: _Optional[_Union[_engine_pb2.Usage, _Mapping]] = ..., timings: _Optional[_Union[_engine_pb2.Timings, _Mapping]] = ..., canvas: _Optional[_Union[CanvasEvent, _Mapping]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[TextLogprobs, _Mapping]]] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class TextChoice(_message.Message):
    __slots__ = ("index", "text", "finish_reason", "stop_reason", "logprobs", "token_ids")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_REASON_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    index: int
    text: str
    finish_reason: str
    stop_reason: str
    logprobs: _containers.RepeatedCompositeFieldContainer[TextLogprobs]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, index: _Optional[int] = ..., text: _Optional[str] = ..., finish_reason: _Optional[str] = ..., stop_reason: _Optional[str] = ..., logprobs: _Optional[_Iterable[_Union[TextLogprobs, _Mapping]]] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class TextLogprobs(_message.Message):
    __slots__ = ("chosen", "top")
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    chosen: TextLogprob
    top: _containers.RepeatedCompositeFieldContainer[TextLogprob]
    def __init__(self, chosen: _Optional[_Union[TextLogprob, _Mapping]] = ..., top: _Optional[_Iterable[_Union[TextLogprob, _Mapping]]] = ...) -> None: ...

class TextLogprob(_message.Message):
    __slots__ = ("token", "logprob", "token_bytes", "token_id")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOKEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    token: str
    logprob: float
    token_bytes: bytes
    token_id: int
    def __init__(self, token: _Optional[str] = ..., logprob: _Optional[float] = ..., token_bytes: _Optional[bytes] = ..., token_id: _Optional[int] = ...) -> None: ...

class CanvasEvent(_message.Message):
    __slots__ = ("index", "block", "step", "token_ids", "fixed", "text", "confidence")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FIXED_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CONFIDENCE_FIELD_NUMBER: _ClassVar[int]
    index: int
    block: int
    step: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    fixed: _containers.RepeatedScalarFieldContainer[bool]
    text: str
    confidence: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, index: _Optional[int] = ..., block: _Optional[int] = ..., step: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., fixed: _Optional[_Iterable[bool]] = ..., text: _Optional[str] = ..., confidence: _Optional[_Iterable[float]] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "parts", "name", "tool_calls", "tool_call_id", "reasoning")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_ID_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    role: str
    parts: _containers.RepeatedCompositeFieldContainer[ContentPart]
    name: str
    tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCall]
    tool_call_id: str
    reasoning: str
    def __init__(self, role: _Optional[str] = ..., parts: _Optional[_Iterable[_Union[ContentPart, _Mapping]]] = ..., name: _Optional[str] = ..., tool_calls: _Optional[_Iterable[_Union[ToolCall, _Mapping]]] = ..., tool_call_id: _Optional[str] = ..., reasoning: _Optional[str] = ...) -> None: ...

class ContentPart(_message.Message):
    __slots__ = ("text", "image_url", "audio_url")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    IMAGE_URL_FIELD_NUMBER: _ClassVar[int]
    AUDIO_URL_FIELD_NUMBER: _ClassVar[int]
    text: str
    image_url: str
    audio_url: str
    def __init__(self, text: _Optional[str] = ..., image_url: _Optional[str] = ..., audio_url: _Optional[str] = ...) -> None: ...

class ToolCall(_message.Message):
    __slots__ = ("index", "id", "name", "arguments_json")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_JSON_FIELD_NUMBER: _ClassVar[int]
    index: int
    id: str
    name: str
    arguments_json: str
    def __init__(self, index: _Optional[int] = ..., id: _Optional[str] = ..., name: _Optional[str] = ..., arguments_json: _Optional[str] = ...) -> None: ...

class Tool(_message.Message):
    __slots__ = ("name", "description", "parameters_json_schema", "strict")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    STRICT_FIELD_NUMBER: _ClassVar[int]
    name: str
    description: str
    parameters_json_schema: str
    strict: bool
    def __init__(self, name: _Optional[str] = ..., description: _Optional[str] = ..., parameters_json_schema: _Optional[str] = ..., strict: _Optional[bool] = ...) -> None: ...

class ToolChoice(_message.Message):
    __slots__ = ("mode", "function_name")
    MODE_FIELD_NUMBER: _ClassVar[int]
    FUNCTION_NAME_FIELD_NUMBER: _ClassVar[int]
    mode: str
    function_name: str
    def __init__(self, mode: _Optional[str] = ..., function_name: _Optional[str] = ...) -> None: ...

class ChatOptions(_message.Message):
    __slots__ = ("tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs", "add_generation_prompt", "continue_final_message", "reasoning_effort")
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CHOICE_FIELD_NUMBER: _ClassVar[int]
    PARALLEL_TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_KWARGS_FIELD_NUMBER: _ClassVar[int]
    ADD_GENERATION_PROMPT_FIELD_NUMBER: _ClassVar[int]
    CONTINUE_FINAL_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    REASONING_EFFORT_FIELD_NUMBER: _ClassVar[int]
    tools: _containers.RepeatedCompositeFieldContainer[Tool]
    tool_choice: ToolChoice
    parallel_tool_calls: bool
    chat_template_kwargs: _struct_pb2.Struct
    add_generation_prompt: bool
    continue_final_message: bool
    reasoning_effort: str
    def __init__(self, tools: _Optional[_Iterable[_Union[Tool, _Mapping]]] = ..., tool_choice: _Optional[_Union[ToolChoice, _Mapping]] = ..., parallel_tool_calls: _Optional[bool] = ..., chat_template_kwargs: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ..., add_generation_prompt: _Optional[bool] = ..., continue_final_message: _Optional[bool] = ..., reasoning_effort: _Optional[str] = ...) -> None: ...

class ChatRequest(_message.Message):
    __slots__ = ("messages", "options", "chat")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    options: TextOptions
    chat: ChatOptions
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., options: _Optional[_Union[TextOptions, _Mapping]] = ..., chat: _Optional[_Union[ChatOptions, _Mapping]] = ...) -> None: ...

class ChatResponse(_message.Message):
    __slots__ = ("id", "model", "created_unix_s", "choices", "usage", "timings", "prompt_logprobs", "prompt_token_ids")
    ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    CREATED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    id: str
    model: str
    created_unix_s: int
    choices: _containers.RepeatedCompositeFieldContainer[ChatChoice]
    usage: _engine_pb2.Usage
    timings: _engine_pb2.Timings
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[TextLogprobs]
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, id: _Optional[str] = ..., model: _Optional[str] = ..., created_unix_s: _Optional[int] = ..., choices: _Optional[_Iterable[_Union[ChatChoice, _Mapping]]] = ..., usage: _Optional[_Union[_engine_pb2.Usage, _Mapping]] = ..., timings: _Optional[_Union[_engine_pb2.Timings, _Mapping]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[TextLogprobs, _Mapping]]] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ChatChoice(_message.Message):
    __slots__ = ("index", "message", "finish_reason", "stop_reason", "logprobs", "token_ids")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_REASON_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    index: int
    message: ChatMessage
    finish_reason: str
    stop_reason: str
    logprobs: _containers.RepeatedCompositeFieldContainer[TextLogprobs]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, index: _Optional[int] = ..., message: _Optional[_Union[ChatMessage, _Mapping]] = ..., finish_reason: _Optional[str] = ..., stop_reason: _Optional[str] = ..., logprobs: _Optional[_Iterable[_Union[TextLogprobs, _Mapping]]] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ChatStreamRequest(_message.Message):
    __slots__ = ("messages", "options", "chat")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    options: TextOptions
    chat: ChatOptions
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., options: _Optional[_Union[TextOptions, _Mapping]] = ..., chat: _Optional[_Union[ChatOptions, _Mapping]] = ...) -> None: ...

class ChatStreamResponse(_message.Message):
    __slots__ = ("id", "model", "created_unix_s", "choice", "usage", "timings", "canvas", "prompt_logprobs", "prompt_token_ids")
    ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    CREATED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    CANVAS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    id: str
    model: str
    created_unix_s: int
    choice: ChatChoice
    usage: _engine_pb2.Usage
    timings: _engine_pb2.Timings
    canvas: CanvasEvent
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[TextLogprobs]
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, id: _Optional[str] = ..., model: _Optional[str] = ..., created_unix_s: _Optional[int] = ..., choice: _Optional[_Union[ChatChoice, _Mapping]] = ..., usage: _Optional[_Union[_engine_pb2.Usage, _Mapping]] = ..., timings: _Optional[_Union[_engine_pb2.Timings, _Mapping]] = ..., canvas: _Optional[_Union[CanvasEvent, _Mapping]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[TextLogprobs, _Mapping]]] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class InfillRequest(_message.Message):
    __slots__ = ("prefix", "suffix", "gap_tokens", "options")
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    SUFFIX_FIELD_NUMBER: _ClassVar[int]
    GAP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    prefix: str
    suffix: str
    gap_tokens: int
    options: TextOptions
    def __init__(self, prefix: _Optional[str] = ..., suffix: _Optional[str] = ..., gap_tokens: _Optional[int] = ..., options: _Optional[_Union[TextOptions, _Mapping]] = ...) -> None: ...

class InfillResponse(_message.Message):
    __slots__ = ("id", "text", "usage")
    ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    id: str
    text: str
    usage: _engine_pb2.Usage
    def __init__(self, id: _Optional[str] = ..., text: _Optional[str] = ..., usage: _Optional[_Union[_engine_pb2.Usage, _Mapping]] = ...) -> None: ...

class EmbedRequest(_message.Message):
    __slots__ = ("model", "inputs", "dimensions", "normalize", "truncate_prompt_tokens")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    NORMALIZE_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    model: str
    inputs: _containers.RepeatedCompositeFieldContainer[Prompt]
    dimensions: int
    normalize: bool
    truncate_prompt_tokens: int
    def __init__(self, model: _Optional[str] = ..., inputs: _Optional[_Iterable[_Union[Prompt, _Mapping]]] = ..., dimensions: _Optional[int] = ..., normalize: _Optional[bool] = ..., truncate_prompt_tokens: _Optional[int] = ...) -> None: ...

class EmbedResponse(_message.Message):
    __slots__ = ("embeddings", "usage")
    EMBEDDINGS_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    embeddings: _containers.RepeatedCompositeFieldContainer[Embedding]
    usage: _engine_pb2.Usage
    def __init__(self, embeddings: _Optional[_Iterable[_Union[Embedding, _Mapping]]] = ..., usage: _Optional[_Union[_engine_pb2.Usage, _Mapping]] = ...) -> None: ...

class Embedding(_message.Message):
    __slots__ = ("index", "values")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    index: int
    values: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, index: _Optional[int] = ..., values: _Optional[_Iterable[float]] = ...) -> None: ...

class ScoreRequest(_message.Message):
    __slots__ = ("model", "pairs", "truncate_prompt_tokens")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PAIRS_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    model: str
    pairs: _containers.RepeatedCompositeFieldContainer[TextPair]
    truncate_prompt_tokens: int
    def __init__(self, model: _Optional[str] = ..., pairs: _Optional[_Iterable[_Union[TextPair, _Mapping]]] = ..., truncate_prompt_tokens: _Optional[int] = ...) -> None: ...

class TextPair(_message.Message):
    __slots__ = ("left", "right")
    LEFT_FIELD_NUMBER: _ClassVar[int]
    RIGHT_FIELD_NUMBER: _ClassVar[int]
    left: str
    right: str
    def __init__(self, left: _Optional[str] = ..., right: _Optional[str] = ...) -> None: ...

class ScoreResponse(_message.Message):
    __slots__ = ("scores", "usage")
    SCORES_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    scores: _containers.RepeatedScalarFieldContainer[float]
    usage: _engine_pb2.Usage
    def __init__(self, scores: _Optional[_Iterable[float]] = ..., usage: _Optional[_Union[_engine_pb2.Usage, _Mapping]] = ...) -> None: ...

class RerankRequest(_message.Message):
    __slots__ = ("model", "query", "documents", "top_n", "truncate_prompt_tokens")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    QUERY_FIELD_NUMBER: _ClassVar[int]
    DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    TOP_N_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    model: str
    query: str
    documents: _containers.RepeatedScalarFieldContainer[str]
    top_n: int
    truncate_prompt_tokens: int
    def __init__(self, model: _Optional[str] = ..., query: _Optional[str] = ..., documents: _Optional[_Iterable[str]] = ..., top_n: _Optional[int] = ..., truncate_prompt_tokens: _Optional[int] = ...) -> None: ...

class RerankResponse(_message.Message):
    __slots__ = ("results", "usage")
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[RankedDocument]
    usage: _engine_pb2.Usage
    def __init__(self, results: _Optional[_Iterable[_Union[RankedDocument, _Mapping]]] = ..., usage: _Optional[_Union[_engine_pb2.Usage, _Mapping]] = ...) -> None: ...

class RankedDocument(_message.Message):
    __slots__ = ("index", "relevance_score")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    RELEVANCE_SCORE_FIELD_NUMBER: _ClassVar[int]
    index: int
    relevance_score: float
    def __init__(self, index: _Optional[int] = ..., relevance_score: _Optional[float] = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("model", "text", "messages", "add_special_tokens", "add_generation_prompt", "chat_template_kwargs")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    ADD_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ADD_GENERATION_PROMPT_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_KWARGS_FIELD_NUMBER: _ClassVar[int]
    model: str
    text: str
    messages: ChatMessages
    add_special_tokens: bool
    add_generation_prompt: bool
    chat_template_kwargs: _struct_pb2.Struct
    def __init__(self, model: _Optional[str] = ..., text: _Optional[str] = ..., messages: _Optional[_Union[ChatMessages, _Mapping]] = ..., add_special_tokens: _Optional[bool] = ..., add_generation_prompt: _Optional[bool] = ..., chat_template_kwargs: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ...) -> None: ...

class ChatMessages(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("token_ids", "max_model_len")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    max_model_len: int
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., max_model_len: _Optional[int] = ...) -> None: ...

class DetokenizeRequest(_message.Message):
    __slots__ = ("model", "token_ids", "skip_special_tokens")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    model: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    skip_special_tokens: bool
    def __init__(self, model: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., skip_special_tokens: _Optional[bool] = ...) -> None: ...

class DetokenizeResponse(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[ModelCard]
    def __init__(self, models: _Optional[_Iterable[_Union[ModelCard, _Mapping]]] = ...) -> None: ...

class GetModelRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class GetModelResponse(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: ModelCard
    def __init__(self, model: _Optional[_Union[ModelCard, _Mapping]] = ...) -> None: ...

class ModelCard(_message.Message):
    __slots__ = ("id", "created_unix_s", "max_model_len", "owned_by", "parent", "default_method", "approximate_caches")
    ID_FIELD_NUMBER: _ClassVar[int]
    CREATED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    OWNED_BY_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_METHOD_FIELD_NUMBER: _ClassVar[int]
    APPROXIMATE_CACHES_FIELD_NUMBER: _ClassVar[int]
    id: str
    created_unix_s: int
    max_model_len: int
    owned_by: str
    parent: str
    default_method: str
    approximate_caches: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, id: _Optional[str] = ..., created_unix_s: _Optional[int] = ..., max_model_len: _Optional[int] = ..., owned_by: _Optional[str] = ..., parent: _Optional[str] = ..., default_method: _Optional[str] = ..., approximate_caches: _Optional[_Iterable[str]] = ...) -> None: ...
