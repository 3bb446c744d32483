"""What a text client sends and gets, as plain values; client.py puts it on the wire.

It does not know gRPC; messages are filled from dicts and read by attribute.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tidemill.asked import Params, beam_fields, sampling_fields
from tidemill.conversation import (
    Conversation,
    Fields,
    Tool,
    ToolCall,
    choice_fields,
    message_fields,
    to_tool_call,
    tool_fields,
)
from tidemill.given import ids_of, printable, settle_options, wrong_kind
from tidemill.runtime.errors import InvalidRequest
from tidemill.sampling_params import BeamSearchParams, SamplingParams

_CHAT_ONLY = ("template", "tools", "tool_choice", "parallel_tool_calls")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOptions:
    """What belongs to one call rather than to sampling."""

    model: str = ""
    """Empty: the model that is served."""
    timeout_s: float | None = None
    """Whole life of the call; afterwards it raises DeadlineExceeded and the engine stops."""
    request_id: str = ""
    """Named in logs; default: the server's choice."""
    priority: int = 0
    """Higher runs sooner."""
    fairness_key: str = ""
    """Requests of one key share a turn, so that no key can starve the others."""
    cache_salt: str = ""
    """Prompts with different salts never share cached pages."""
    return_token_ids: bool = False
    echo: bool = False
    """Put the prompt in front of the text (generate only)."""
    emit_canvas: bool = False
    """Streams of block diffusion: also send tentative states, as deltas with a canvas."""
    template: Mapping[str, Any] = field(default_factory=dict)
    """Variables for the chat template (chat only)."""
    tools: Sequence[Tool] = ()
    """What the model may call, in OpenAI's form (chat only); the calls are `Choice.tool_calls`."""
    tool_choice: str | Mapping[str, Any] = ""
    """auto (the default where there are tools); none, for which the model is told of no tools;
    required, or a function by name: the answer is calls alone, by the tools' schemas (chat
    only)."""
    parallel_tool_calls: bool = True
    """False: only the first call of an answer is told (chat only)."""
    traceparent: str = ""
    """W3C trace context of the caller; default: OpenTelemetry's current span, if there is one."""

    def __post_init__(self) -> None:
        settle_options(self, beside=("template", "tools", "tool_choice"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One generated sequence; in a stream, its newest part. `finish_reason` is '' until the end."""

    index: int
    text: str
    finish_reason: str
    stop_reason: str
    token_ids: list[int]
    logprobs: list[Any]
    reasoning: str = ""
    """Of chats: the model's reasoning, where the server tells it apart from the text."""
    tool_calls: list[ToolCall] = field(default_factory=list)
    """Of chats with tools; `finish_reason` is then tool_calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A finished answer. `usage` and `timings` are the server's counts."""

    id: str
    model: str
    choices: list[Choice]
    prompt_logprobs: list[Any]
    """Scores of the prompt, from its second token on, if they were asked for."""
    usage: Any
    timings: Any
    prompt_token_ids: list[int] = field(default_factory=list)
    """With `return_token_ids`: the prompt as the engine got it."""

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return self.choices[0].text

    @property
    def tool_calls(self) -> list[ToolCall]:
        """The tool calls of the first choice."""
        return self.choices[0].tool_calls


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """One event of a stream: a choice's news, a canvas, or, last, the usage.

    `prompt_logprobs` come once, with the first tokens of choice 0, `prompt_token_ids` with the
    first event.
    """

    id: str
    choice: Choice | None
    prompt_logprobs: list[Any]
    canvas: Any
    usage: Any
    timings: Any
    prompt_token_ids: list[int] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The new text, '' for events without any."""
        return "" if self.choice is None else self.choice.text

    @property
    def tool_calls(self) -> list[ToolCall]:
        """News of tool calls, none for events without any."""
        return [] if self.choice is None else self.choice.tool_calls


@dataclass(frozen=True, slots=True, kw_only=True)
class Filling:
    """What stands between a prefix and a suffix."""

    id: str
    text: str
    usage: Any


def text_fields(
    prompt: str | Sequence[int], params: Params | None, options: CallOptions | None
) -> Fields:
    """Fields of a request for text; without `params` the engine's defaults and 16 tokens."""
    options = checked_options(options)
    _refuse(options, "generate", _CHAT_ONLY)
    if isinstance(prompt, str):
        content: Fields = {"text": prompt}
    else:
        content = {"tokens": {"token_ids": ids_of("prompt", prompt, "a text or token ids")}}
    chosen = SamplingParams() if params is None else params
    return {"prompt": content, "options": _options(chosen, options), "echo": options.echo}


def chat_fields(
    messages: Conversation, params: Params | None, options: CallOptions | None
) -> Fields:
    """Fields of a request for a chat; without `params` it may fill the context."""
    options = checked_options(options)
    _refuse(options, "chat", ("echo",))
    chosen = SamplingParams(max_tokens=None) if params is None else params
    fields: Fields = {"messages": message_fields(messages), "options": _options(chosen, options)}
    if chat := _chat_options(options):
        fields["chat"] = chat
    return fields


def infill_fields(
    texts: tuple[str, str], params: SamplingParams | None, options: CallOptions | None
) -> Fields:
    """Fields of a request for what stands between two texts: `max_tokens` of `params`, 16 without
    them, is the length of the gap."""
    options = checked_options(options)
    _refuse(options, "infill", ("echo", *_CHAT_ONLY))
    sampling = _options(SamplingParams() if params is None else params, options)
    gap = sampling["sampling"].pop("max_tokens")
    return {"prefix": texts[0], "suffix": texts[1], "gap_tokens": gap, "options": sampling}


def tokenize_fields(text: Conversation, add_special_tokens: bool | None) -> Fields:
    """Fields of a request for token ids."""
    fields: Fields = {"add_special_tokens": add_special_tokens}
    if isinstance(text, str):
        return {"text": text, **fields}
    return {"messages": {"messages": message_fields(text)}, **fields}


def checked_options(options: CallOptions | None) -> CallOptions:
    """The options of a call, or those of one that has none. Raises InvalidRequest for others."""
    if options is None:
        return CallOptions()
    if not isinstance(options, CallOptions):
        raise wrong_kind("options", options, "CallOptions or None")
    return options


def timeout_of(options: CallOptions | None) -> float | None:
    """The call's deadline in seconds."""
    return checked_options(options).timeout_s


def metadata_of(options: CallOptions | None) -> tuple[tuple[str, str], ...]:
    """What travels beside the request. Raises InvalidRequest for what cannot."""
    given = checked_options(options)
    pairs = (
        ("x-request-id", printable("request_id", given.request_id)),
        ("x-priority", str(given.priority) if given.priority else ""),
        ("x-fairness-key", printable("fairness_key", given.fairness_key)),
        ("traceparent", printable("traceparent", given.traceparent)),
    )
    return tuple((name, value) for name, value in pairs if value)


def to_completion(answer: Any) -> Completion:
    """A Generate or Chat response as a Completion."""
    return Completion(
        id=answer.id,
        model=answer.model,
        choices=[_choice(choice) for choice in answer.choices],
        prompt_logprobs=list(answer.prompt_logprobs),
        usage=answer.usage,
        timings=answer.timings,
        prompt_token_ids=list(answer.prompt_token_ids),
    )


def to_filling(answer: Any) -> Filling:
    """An Infill response as a Filling."""
    return Filling(id=answer.id, text=answer.text, usage=answer.usage)


def to_delta(message: Any) -> Delta:
    """One message of a stream."""
    return Delta(
        id=message.id,
        choice=_choice(message.choice) if message.HasField("choice") else None,
        prompt_logprobs=list(message.prompt_logprobs),
        canvas=message.canvas if message.HasField("canvas") else None,
        usage=message.usage if message.HasField("usage") else None,
        timings=message.timings if message.HasField("timings") else None,
        prompt_token_ids=list(message.prompt_token_ids),
    )


def _choice(choice: Any) -> Choice:
    is_chat = hasattr(choice, "message")
    text = "".join(p.text for p in choice.message.parts) if is_chat else choice.text
    return Choice(
        index=choice.index,
        text=text,
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
        token_ids=list(choice.token_ids),
        logprobs=list(choice.logprobs),
        reasoning=choice.message.reasoning if is_chat else "",
        tool_calls=[to_tool_call(call) for call in choice.message.tool_calls] if is_chat else [],
    )


def _refuse(options: CallOptions, method: str, names: Sequence[str]) -> None:
    """Raises InvalidRequest for options that the method would not heed."""
    unset = CallOptions()
    for name in names:
        if bool(getattr(options, name)) != bool(getattr(unset, name)):
            raise InvalidRequest(f"{method} does not read {name}; leave it out", param=name)


def _chat_options(options: CallOptions) -> Fields:
    chat: Fields = {}
    if options.template:
        if not isinstance(options.template, Mapping):
            raise wrong_kind("template", options.template, "a mapping of variables to values")
        chat["chat_template_kwargs"] = dict(options.template)
    if options.tools:
        chat["tools"] = tool_fields(options.tools)
    if options.tool_choice:
        chat["tool_choice"] = choice_fields(options.tool_choice)
    if not options.parallel_tool_calls:
        chat["parallel_tool_calls"] = False
    return chat


def _options(params: Params, options: CallOptions) -> Fields:
    if not isinstance(params, SamplingParams | BeamSearchParams):
        raise wrong_kind("params", params, "SamplingParams, BeamSearchParams or None")
    return {
        **(
            beam_fields(params) if isinstance(params, BeamSearchParams) else sampling_fields(params)
        ),
        "model": options.model,
        "cache_salt": options.cache_salt,
        "return_token_ids": options.return_token_ids,
        "emit_canvas": options.emit_canvas,
    }
