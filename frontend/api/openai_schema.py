"""The bodies of the OpenAI-compatible routes, with the extensions other servers taught users.

Shapes only: values are checked by frontend.validation and by the engine. Numbers and flags are
strict: true is no 1 and "5" no 5. Fields that are not named here are kept aside (`model_extra`), so
that not_served.py can refuse those that other servers know.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    StrictBool,
    StrictFloat,
    StrictInt,
    model_validator,
)
from pydantic_core import PydanticKnownError

TOOL_NAME = r"^[A-Za-z0-9_.-]{1,128}$"
Int32 = Annotated[StrictInt, Field(ge=-(2**31), lt=2**31)]


_MOST_NAMES = 10_000
"""In an object whose entries are checked: every fault of one is kept until the first is told."""


def few(given: Any) -> Any:
    """The same, unless it is an object of more entries than anybody has a use for."""
    if isinstance(given, dict) and len(given) > _MOST_NAMES:
        kept = {"max_length": _MOST_NAMES, "actual_length": len(given)}
        raise PydanticKnownError("too_long", {"field_type": "Object", **kept})
    return given


def _end_at_first_fault(schema: Any) -> None:
    """In every list of a schema of pydantic's core."""
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            schema["fail_fast"] = True
        for part in schema.values():
            _end_at_first_fault(part)
    elif isinstance(schema, list | tuple):
        for part in schema:
            _end_at_first_fault(part)


class Body(BaseModel):
    """Any request body. What is said of its fields stands in the OpenAPI document too."""

    model_config = ConfigDict(extra="allow", protected_namespaces=(), use_attribute_docstrings=True)
    not_served: ClassVar[Mapping[str, tuple[object, ...]]] = MappingProxyType({})
    """Parameters of this API alone that are refused, with the values that ask for nothing."""
    other_names: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Parameters that this API does not take, and what to use instead."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> Any:
        """Lists end at their first fault, the only one that is told: of a million, seconds and
        gigabytes went into all the others."""
        schema = handler(source)
        _end_at_first_fault(schema)
        return schema

    @model_validator(mode="before")
    @classmethod
    def _check_size(cls, given: Any) -> Any:
        return few(given)


class StreamOptions(Body):
    """`stream_options`; only for streams."""

    model_config = ConfigDict(extra="forbid")

    include_usage: StrictBool | None = None
    """Send one last chunk with the usage and no choices."""
    continuous_usage_stats: StrictBool | None = None
    """Send the usage up to now with every chunk."""
    include_canvas: StrictBool | None = None
    """Diffusion: send the tentative state of the block in chunks with a `canvas` and no choices;
    `start` tokens of the choice `index` stand before it."""
    include_obfuscation: Literal[False] | None = None
    """OpenAI's padding against observers of packet sizes; it is not served."""


class DecodingBody(Body):
    """`decoding`: a method of the engine and its knobs."""

    model_config = ConfigDict(extra="forbid")

    method: str | None = None
    params: dict[str, Any] | None = None


class StructuredOutputsBody(Body):
    """`structured_outputs`, as vLLM has it: exactly one field says what the answer must be."""

    model_config = ConfigDict(extra="forbid")

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: StrictBool | None = None
    structural_tag: dict[str, Any] | str | None = None


class GenerationBody(Body):
    """What completions and chat completions share. null is the same as leaving a field out."""

    model: str | None = None
    temperature: StrictFloat | None = None
    top_p: StrictFloat | None = None
    top_k: Int32 | None = None
    """0 or -1 turns the filter off."""
    min_p: StrictFloat | None = None
    n: StrictInt | None = None
    best_of: StrictInt | None = None
    """Sequences to generate, of which the n likeliest are returned, best first; not for streams.
    All of them count in the usage."""
    use_beam_search: StrictBool | None = None
    """The n best of best_of beams (n where it is not given), not for streams and not beside what
    changes probabilities. Likelihood is per token, as with best_of."""
    length_penalty: StrictFloat | None = None
    """Beam search: above 1 (the default) favours longer answers, below shorter ones."""
    early_stopping: StrictBool | None = None
    """Beam search: take the first best_of that end, instead of waiting for better ones."""
    max_tokens: Int32 | None = None
    max_completion_tokens: Int32 | None = None
    """Another name of max_tokens; goes before it."""
    min_tokens: Int32 | None = None
    min_new_tokens: Int32 | None = None
    """Another name of min_tokens, which goes before it."""
    stop: str | list[str] | None = None
    """Up to 16 strings of up to 1024 characters; they are cut from the text."""
    stop_token_ids: list[StrictInt] | None = None
    include_stop_str_in_output: StrictBool | None = None
    ignore_eos: StrictBool | None = None
    seed: StrictInt | None = None
    presence_penalty: StrictFloat | None = None
    frequency_penalty: StrictFloat | None = None
    repetition_penalty: StrictFloat | None = None
    logit_bias: Annotated[dict[int, StrictFloat] | None, BeforeValidator(few)] = None
    """Keys are token ids, written as strings."""
    allowed_token_ids: list[StrictInt] | None = Field(default=None, min_length=1)
    """Only these may be chosen."""
    bad_words: list[str] | None = None
    """Up to 256 texts that must not appear, as the tokenizer writes them with and without a space
    in front; of several tokens each only where tokens are decided from the left."""
    response_format: dict[str, Any] | None = None
    """text, json_object, json_schema, or structural_tag with structures and triggers. The answer
    follows the schema from its first token on, behind the reasoning if the model reasons, and ends
    where it is complete. Beside tools that may be called, calls may stand in place of the JSON."""
    structured_outputs: StructuredOutputsBody | None = None
    """vLLM's form: exactly one of json, regex, choice, grammar, json_object, structural_tag."""
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    """Lark as llguidance reads it, or GBNF."""
    json_schema: dict[str, Any] | str | None = None
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | None = None
    prompt_logprobs: StrictInt | None = None
    skip_special_tokens: StrictBool | None = None
    add_special_tokens: StrictBool | None = None
    spaces_between_special_tokens: StrictBool | None = None
    """false: no space between two special tokens that are shown."""
    truncate_prompt_tokens: StrictInt | None = None
    """Keep this many tokens of the prompt; -1: as many as the context leaves beside the answer."""
    truncation_side: Literal["left", "right"] | None = None
    """Where truncate_prompt_tokens cuts: left, if it is not given, keeps the last tokens."""
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: StrictBool | None = None
    """Token ids of the prompt (`prompt_token_ids`) and of what is generated (`token_ids`), those
    that are not shown included."""
    priority: Int32 | None = None
    """Higher runs sooner."""
    cache_salt: str | None = None
    """Up to 1024 characters; prompts with different salts never share cached pages."""
    user: str | None = None
    """Whom the client serves; written to the request's log line. Session affinity goes by it where
    there is no prompt_cache_key."""
    prompt_cache_key: str | None = None
    """Names requests that share much of their prompts, for session affinity among several engines;
    equal beginnings share their pages without it."""
    decoding: DecodingBody | None = None
    """Decoding method and its knobs; unknown knobs are refused by the engine, null is not given."""
    threshold: StrictFloat | None = None
    """Diffusion: the same as decoding.params.threshold."""
    steps: StrictInt | None = None
    """Diffusion: the same as decoding.params.steps."""
    remasking: str | None = None
    """Diffusion: the same as decoding.params.remasking."""


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: Any
    """str, [str], [int] or [[int]]."""
    suffix: str | None = None
    """Text behind the completion, which then is exactly max_tokens long (infilling): no stop token
    ends it. Needs a diffusion model. Block diffusion sees of a suffix what lies in the block that
    it fills."""
    logprobs: StrictInt | None = None
    echo: StrictBool | None = None
    """Put the prompt in front; with logprobs its tokens are scored, and max_tokens 0 only scores.

    Scoring needs room for one token behind the prompt: the engine computes it, nobody sees it. So
    the longest prompt that can be scored is one token shorter than the context.
    """


class Message(Body):
    """One message; what else it carries is passed to the template."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[dict[str, Any]] | None = None


class FunctionBody(Body):
    """What a tool does and takes; `parameters` is a JSON schema."""

    name: str = Field(pattern=TOOL_NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: StrictBool | None = None


class ToolBody(Body):
    """One tool. Only functions are served."""

    type: Literal["function"]
    function: FunctionBody


class ChatBody(GenerationBody):
    """POST /v1/chat/completions. Without max_tokens an answer may fill the context."""

    messages: list[Message] = Field(min_length=1, max_length=10_000)
    logprobs: StrictBool | None = None
    top_logprobs: StrictInt | None = None
    add_generation_prompt: StrictBool | None = None
    continue_final_message: StrictBool | None = None
    """Continue the text of the last message, which must be the assistant's."""
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    tools: list[ToolBody] | None = None
    """What the model may call. Needs a chat template with a place for tools."""
    tool_choice: str | dict[str, Any] | None = None
    """auto; none, for which the model is told of no tools; required, or a function by name: the
    answer is calls alone, which follow the tools' schemas. allowed_tools: auto or required among
    some of the tools, the only ones that the model is told of."""
    parallel_tool_calls: StrictBool | None = None
    """false: only the first call of an answer is told."""
    include_reasoning: StrictBool | None = None
    """false: the reasoning is left out of the answer; it is generated and counted all the same."""


class TokenizeBody(Body):
    """POST /tokenize: either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[ToolBody] | None = None
    """What the model is told of with the messages."""
    add_special_tokens: StrictBool | None = None
    add_generation_prompt: StrictBool | None = None
    continue_final_message: StrictBool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: StrictBool | None = None


class DetokenizeBody(Body):
    """POST /detokenize."""

    not_served = MappingProxyType({"tools": ([],)})

    model: str | None = None
    tokens: list[StrictInt]
    skip_special_tokens: StrictBool | None = None
