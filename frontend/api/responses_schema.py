"""The body of POST /v1/responses. Shapes only, as in openai_schema.py."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Field, StrictBool, StrictFloat, StrictInt

from frontend.api.openai_schema import TOOL_NAME, Body, DecodingBody, Int32, few

LOGPROBS = "message.output_text.logprobs"
Includes = list[
    Literal[
        "message.output_text.logprobs",
        "reasoning.encrypted_content",
        "file_search_call.results",
        "web_search_call.results",
        "web_search_call.action.sources",
        "message.input_image.image_url",
        "computer_call_output.output.image_url",
        "code_interpreter_call.outputs",
    ]
]
"""What OpenAI can be asked to tell beside an answer."""


class InputItem(Body):
    """One item of `input`: a message, a call of a tool, its output, or reasoning."""

    model_config = ConfigDict(extra="ignore")
    id: str | None = None
    type: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[dict[str, Any]] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | list[dict[str, Any]] | None = None


class ResponsesTool(Body):
    """One tool: a function, or of free form (custom)."""

    type: str
    name: str | None = Field(default=None, pattern=TOOL_NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: StrictBool | None = None
    format: dict[str, Any] | None = None
    """Of custom: text, or a grammar (lark or regex) of what the tool is given. A Lark grammar goes
    with a tool_choice that names the tool, or where the model writes texts as they stand
    (qwen3_coder, glm45)."""


class ReasoningBody(Body):
    """`reasoning`: how much, and in what form it is told."""

    model_config = ConfigDict(extra="forbid")
    effort: str | None = None
    """Told to the chat template, which must have such a setting."""
    summary: Literal["auto", "concise", "detailed"] | None = None
    """Nothing is summarized: what is told of reasoning is all of it, in the items' content."""
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    """The older name of summary."""


class TextBody(Body):
    """`text`: what the answer's text must be."""

    model_config = ConfigDict(extra="forbid")

    format: dict[str, Any] | None = None
    """text, json_object or json_schema, as response_format of chats, without the inner object."""
    verbosity: Literal["medium"] | None = None


class ResponseStreamOptions(Body):
    """`stream_options`; only for streams."""

    model_config = ConfigDict(extra="forbid")
    include_obfuscation: Literal[False] | None = None
    """OpenAI's padding against observers of packet sizes; it is not served."""


class ResponsesBody(Body):
    """POST /v1/responses. Without max_output_tokens an answer may fill the context."""

    not_served: ClassVar[Mapping[str, tuple[object, ...]]] = MappingProxyType(
        {
            "max_tool_calls": (),
            "truncation": ("disabled",),
            "conversation": (),
            "prompt": (),
            "context_management": ([],),
            "moderation": (),
            "image": (),
            "access_programs": (),
            "prompt_cache_retention": ("in_memory",),
            "prompt_cache_options": ({},),
            "service_tier": ("auto", "default"),
        }
    )
    other_names: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "max_tokens": "max_output_tokens",
            "max_completion_tokens": "max_output_tokens",
            "messages": "input",
            "logprobs": f'top_logprobs, with include ["{LOGPROBS}"]',
        }
    )

    model: str | None = None
    input: str | Annotated[list[InputItem], Field(min_length=1, max_length=10_000)]
    instructions: str | None = None
    """A system message in front; those of an earlier response are not taken over."""
    max_output_tokens: Annotated[Int32, Field(ge=1)] | None = None
    temperature: StrictFloat | None = None
    top_p: StrictFloat | None = None
    include: Includes | None = None
    """All but the first one ask for parts of items that are never made here, or for reasoning in a
    form that is not needed: it is told as it is."""
    top_logprobs: StrictInt | None = None
    stream: StrictBool | None = None
    stream_options: ResponseStreamOptions | None = None
    store: StrictBool | None = None
    """Keep the response, in the memory of this frontend; yes if it is not given."""
    previous_response_id: str | None = None
    background: StrictBool | None = None
    """Answer at once; the response is asked for later. Needs store. With stream its events can be
    read from GET /v1/responses/ID?stream=true too, by any number of clients, from any event on
    (starting_after); a client that leaves does not end it."""
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
            Field(max_length=16),
            BeforeValidator(few),
        ]
        | None
    ) = None
    user: str | None = None
    """Whom the client serves; written to the request's log line. Session affinity goes by it where
    there is no prompt_cache_key."""
    safety_identifier: str | None = None
    """Another name of user, which goes before it."""
    prompt_cache_key: str | None = None
    """Names requests that share much of their prompts, for session affinity among several engines;
    equal beginnings share their pages without it."""
    reasoning: ReasoningBody | None = None
    text: TextBody | None = None
    tools: list[ResponsesTool] | None = None
    """Need a chat template with a place for tools."""
    tool_choice: str | dict[str, Any] | None = None
    """auto; none, for which the model is told of no tools; required, or a tool by name: the answer
    is calls alone, which follow the tools' schemas. allowed_tools: auto or required among some of
    the tools, the only ones that the model is told of."""
    parallel_tool_calls: StrictBool | None = None
    """false: only the first call of an answer is told."""
    seed: StrictInt | None = None
    """Not OpenAI's: the same seed draws the same tokens."""
    decoding: DecodingBody | None = None
    """Not OpenAI's: decoding method and its knobs; unknown knobs are refused by the engine."""
