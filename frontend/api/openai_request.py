"""OpenAI bodies as requests of the frontend: parsing, and the words for what is wrong with them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import orjson
from pydantic import ValidationError

from frontend.api.not_served import refuse_unserved
from frontend.api.openai_schema import (
    Body,
    ChatBody,
    CompletionBody,
    DecodingBody,
    GenerationBody,
    Message,
)
from frontend.api.openai_tools import CHOICE, with_arguments, with_tools
from frontend.api.structured import to_constraint
from frontend.api.wrong_fields import invalid, short
from frontend.request import Beam, Chat, Decoding, Options, Prompt, Sampling, TextRequest
from frontend.validation import check_streamed
from tidemill.nesting import MAX_DEPTH, is_too_deep
from tidemill.runtime.errors import InvalidRequest, Unsupported

Parsed = TypeVar("Parsed", bound=Body)
_TEXTS: Mapping[str, str] = MappingProxyType(
    {"text": "text", "input_text": "text", "refusal": "refusal"}
)
"""Kinds of content parts that are served, and the field of their text."""
_KNOBS = ("threshold", "steps", "remasking")
"""Knobs of `decoding` that may stand beside it."""


def parse(body: bytes, kind: type[Parsed]) -> Parsed:
    """The body as `kind`. Raises InvalidRequest naming the field, or saying that it is no JSON,
    and Unsupported naming a parameter that other servers know."""
    try:
        loaded = orjson.loads(body)
    except orjson.JSONDecodeError as failure:
        raise InvalidRequest(
            f"the request body is not valid JSON in UTF-8: {failure}", reason="INVALID_JSON"
        ) from failure
    if not isinstance(loaded, dict):
        raise InvalidRequest(
            f"the request body must be a JSON object, not {type(loaded).__name__}",
            reason="INVALID_JSON",
        )
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH and is_too_deep(loaded):
        raise InvalidRequest(
            f"the request body has more than {MAX_DEPTH} objects and lists inside of each other",
            reason="INVALID_JSON",
        )
    return as_body(loaded, kind)


def as_body(given: dict[str, Any], kind: type[Parsed]) -> Parsed:
    """The same of JSON that has been read."""
    try:
        parsed = kind.model_validate(given)
    except ValidationError as failure:
        raise invalid(failure, given) from failure
    refuse_unserved(parsed)
    return parsed


def to_completion(body: CompletionBody) -> TextRequest:
    """The request behind POST /v1/completions."""
    options = _options(body, logprobs=body.logprobs, echo=bool(body.echo))
    return TextRequest(
        prompts=_prompts(body.prompt),
        options=options,
        suffix=body.suffix or "",
        names=_names(body),
    )


def to_chat(body: ChatBody) -> TextRequest:
    """The request behind POST /v1/chat/completions."""
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    options = _options(body, logprobs=logprobs)
    kwargs = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        kwargs["reasoning_effort"] = body.reasoning_effort
    chat = to_messages(
        body.messages,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        template_kwargs=kwargs,
    )
    parallel = body.parallel_tool_calls
    choice = CHOICE.read(body.tool_choice)
    chat = with_tools(chat, body.tools or [], choice, parallel=parallel)
    return TextRequest(
        prompts=(chat,),
        options=options,
        prompt_param="messages",
        logprobs_param="top_logprobs",
        names=_names(body),
    )


def to_messages(
    messages: list[Message],
    *,
    add_generation_prompt: bool | None,
    continue_final_message: bool | None,
    template_kwargs: dict[str, Any],
) -> Chat:
    """A conversation for the template; continuing a message implies no generation prompt."""
    continues = bool(continue_final_message)
    return Chat(
        messages=[to_message(message, f"messages[{i}]") for i, message in enumerate(messages)],
        add_generation_prompt=not continues
        if add_generation_prompt is None
        else add_generation_prompt,
        continue_final_message=continues,
        template_kwargs=template_kwargs,
    )


def _options(
    body: GenerationBody,
    *,
    logprobs: int | None,
    echo: bool = False,
) -> Options:
    stop, beam = body.stop or (), to_beam(body)
    stream_options = body.stream_options
    if stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream to be true", param="stream_options")
    options = Options(
        model=body.model or "",
        n=1 if body.n is None else body.n,
        best_of=None if beam else body.best_of,
        beam=beam,
        sampling=_sampling(body),
        decoding=to_decoding(body.decoding, **{name: getattr(body, name) for name in _KNOBS}),
        constraint=to_constraint(body),
        bad_words=tuple(body.bad_words or ()),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=body.ignore_eos,
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        spaces_between_special_tokens=body.spaces_between_special_tokens is not False,
        add_special_tokens=body.add_special_tokens,
        logprobs=logprobs,
        prompt_logprobs=body.prompt_logprobs,
        echo=echo,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        truncation_side=body.truncation_side or "left",
        cache_salt=body.cache_salt or "",
        priority=body.priority or 0,
        emit_canvas=bool(stream_options and stream_options.include_canvas),
        user=body.user or "",
        session=body.prompt_cache_key or "",
    )
    if body.stream:
        check_streamed(options)
    return options


def to_beam(body: GenerationBody) -> Beam | None:
    """Beam search, where it is asked for; its knobs are refused elsewhere."""
    if body.use_beam_search:
        width = body.best_of or body.n or 1
        penalty = 1.0 if body.length_penalty is None else body.length_penalty
        return Beam(width, penalty, bool(body.early_stopping))
    for name, neutral in (("length_penalty", 1.0), ("early_stopping", False)):
        if getattr(body, name) not in (None, neutral):
            raise InvalidRequest(f"{name} needs use_beam_search to be true", param=name)
    return None


def _sampling(body: GenerationBody) -> Sampling:
    max_tokens, min_tokens = body.max_completion_tokens, body.min_tokens
    return Sampling(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias=body.logit_bias or {},
        seed=to_seed(body.seed),
        max_tokens=body.max_tokens if max_tokens is None else max_tokens,
        min_tokens=body.min_new_tokens if min_tokens is None else min_tokens,
        allowed_token_ids=tuple(body.allowed_token_ids or ()),
    )


def _names(body: GenerationBody) -> dict[str, str]:
    """What the client calls parameters that have several names."""
    names = {f"decoding.params.{one}": one for one in _KNOBS if getattr(body, one) is not None}
    if body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    if body.min_tokens is None and body.min_new_tokens is not None:
        names["min_tokens"] = "min_new_tokens"
    return names


def to_seed(given: int | None) -> int | None:
    """Any integer as the engine's unsigned 64 bits."""
    return None if given is None else given & (2**64 - 1)


def to_decoding(given: DecodingBody | None, **shortcuts: Any) -> Decoding:
    """`decoding`, with the shortcuts that are not None merged in. Raises InvalidRequest for one
    that says something else than `decoding` does."""
    params = dict((given and given.params) or {})
    for name, value in shortcuts.items():
        if value is not None and params.setdefault(name, value) != value:
            raise InvalidRequest(
                f"{name} is {value!r} and decoding.params.{name} is something else: leave out "
                "either of them",
                param=name,
            )
    return Decoding(method=given.method if given else None, params=params)


def _prompts(given: object) -> tuple[Prompt, ...]:
    if isinstance(given, str):
        return (given,)
    if isinstance(given, list) and given:
        if all(isinstance(one, str) for one in given):
            return tuple(given)
        if _are_ids(given):
            return (tuple(given),)
        if all(isinstance(one, list) and _are_ids(one) for one in given):
            return tuple(tuple(one) for one in given)
    if given == []:
        raise InvalidRequest("prompt is empty; it needs at least one token", param="prompt")
    raise InvalidRequest(
        "prompt must be a string, a list of strings, a list of token ids or a list of lists of "
        f"token ids (got {short(given)})",
        param="prompt",
    )


def _are_ids(values: list[object]) -> bool:
    return all(type(value) is int for value in values)


def to_message(message: Message, place: str) -> dict[str, Any]:
    """A message with plain text content; what else it carries is the template's to read.

    `place` is where it stands in the body, for errors: messages[0].
    """
    content = message.content
    beside = {k: value for k, value in (message.model_extra or {}).items() if value is not None}
    if "reasoning" in beside:  # clients send it back under either name, templates read one
        beside.setdefault("reasoning_content", beside.pop("reasoning"))
    calls = beside.get("tool_calls", [])
    if not isinstance(calls, list):
        raise InvalidRequest(
            f"{place}.tool_calls must be a list (got {short(calls)})", param=f"{place}.tool_calls"
        )
    if calls:
        beside["tool_calls"] = [with_arguments(call, f"{place}.tool_calls") for call in calls]
    elif content in (None, []) and message.role != "assistant":  # whose call may have been cut off
        raise InvalidRequest(f"{place}.content is missing", param=f"{place}.content")
    if isinstance(content, list):
        content = to_text(content, f"{place}.content")
    return {"role": message.role, "content": content or "", **beside}


def to_text(parts: list[dict[str, Any]], param: str) -> str:
    """The text of content parts, a line each. Raises Unsupported for parts of another kind."""
    return "\n".join(_part_text(part, param) for part in parts)


def _part_text(part: object, param: str) -> str:
    if not isinstance(part, dict):
        raise InvalidRequest(f"{param}: a content part must be an object", param=param)
    kind = part.get("type", "text")
    field = _TEXTS.get(kind) if isinstance(kind, str) else None
    if field is None:
        raise Unsupported(f"content parts of type {kind!r} are not served yet", param=param)
    text = part.get(field)
    if not isinstance(text, str):
        raise InvalidRequest(f"{param}: a {kind} part needs a string in `{field}`", param=param)
    return text
