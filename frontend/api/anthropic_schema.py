"""The bodies of the Anthropic-compatible routes. Shapes only, as in openai_schema.py.

`cache_control` is taken and has no effect anywhere: equal beginnings of prompts share their pages
without being marked.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, StrictBool, StrictFloat, StrictInt

from frontend.api.openai_schema import TOOL_NAME, Body, DecodingBody, Int32, Message
from frontend.validation import MAX_STOP_CHARS, MAX_STOPS


class Turn(Message):
    """One message: a text, or blocks of text, thinking, tool calls and their results."""

    model_config = ConfigDict(extra="ignore")
    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class Tool(Body):
    """One tool of the client's; those that run on Anthropic's servers are not served."""

    type: str | None = None
    name: str = Field(pattern=TOOL_NAME)
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: StrictBool | None = None


class ToolChoice(Body):
    """`tool_choice`; `any` and `tool` force a call."""

    type: Literal["auto", "none", "any", "tool"]
    name: str | None = None
    disable_parallel_tool_use: StrictBool | None = None
    """Only the first call of an answer is told."""


class Thinking(Body):
    """`thinking`: whether blocks of thinking are part of the answer. Left out, it is disabled."""

    type: Literal["adaptive", "disabled", "enabled"]
    """disabled: the model is told not to think, where its chat template can say so (a variable
    `enable_thinking`), and what it thinks is not told."""
    budget_tokens: Annotated[Int32, Field(ge=1024)] | None = None
    """Goes with enabled, and is less than max_tokens. As Anthropic has it a target and no limit:
    models here aim at none, so that only max_tokens bounds what they think."""
    display: Literal["summarized", "omitted"] | None = None
    """summarized: nothing is, all of it is told. omitted: none of it is."""


class OutputConfig(Body):
    """`output_config`: what the answer's text must be."""

    model_config = ConfigDict(extra="forbid")
    format: dict[str, Any] | None = None
    """{"type": "json_schema", "schema": ...}."""
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    """Told to chat templates that read `reasoning_effort`; others are served with high, Anthropic's
    default, which asks for nothing."""


class ContextEdit(Body):
    """One edit of `context_management`."""

    model_config = ConfigDict(extra="forbid")
    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"]
    """Nothing is cleared here; what a chat template does with earlier thinking is its own."""


class ContextManagement(Body):
    """`context_management`: what is cleared from long conversations. Only nothing is served."""

    model_config = ConfigDict(extra="forbid")
    edits: list[ContextEdit] = Field(default_factory=list)


class CountTokensBody(Body):
    """POST /v1/messages/count_tokens."""

    not_served: ClassVar[Mapping[str, tuple[object, ...]]] = MappingProxyType(
        {
            "mcp_servers": ([],),
            "container": (),
            "diagnostics": (),
            "inference_geo": (),
            "service_tier": ("auto", "standard_only"),
            "speed": ("standard",),
            "user_profile_id": (),
            "workspace_id": (),
        }
    )
    other_names: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"max_completion_tokens": "max_tokens", "stop": "stop_sequences"}
    )

    model: str | None = None
    messages: list[Turn] = Field(min_length=1, max_length=100_000)
    """Turns of the same role that follow each other are one. A last turn of the assistant is
    continued."""
    system: str | list[dict[str, Any]] | None = None
    tools: list[Tool] | None = None
    """Need a chat template with a place for tools."""
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: dict[str, Any] | None = None
    """The older name of output_config.format."""
    context_management: ContextManagement | None = None
    cache_control: dict[str, Any] | None = None


class Metadata(Body):
    """`metadata`."""

    user_id: str | None = None
    """Whom the client serves; written to the request's log line, and without any other effect."""


class MessagesBody(CountTokensBody):
    """POST /v1/messages."""

    max_tokens: Annotated[Int32, Field(ge=1)]
    temperature: StrictFloat | None = None
    top_p: StrictFloat | None = None
    top_k: Int32 | None = None
    stop_sequences: list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]] | None = (
        Field(default=None, max_length=MAX_STOPS)
    )
    """They are cut from the text."""
    stream: StrictBool | None = None
    metadata: Metadata | None = None
    seed: StrictInt | None = None
    """Not Anthropic's: the same seed draws the same tokens."""
    decoding: DecodingBody | None = None
    """Not Anthropic's: decoding method and its knobs; unknown knobs are refused by the engine."""
