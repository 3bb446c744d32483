"""Messages of TextService as requests of the frontend, and results as messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from google.protobuf import json_format
from google.protobuf.struct_pb2 import Struct

from frontend.api.grpc_text_tools import with_tools
from frontend.api.openai_tools import with_arguments
from frontend.messages import Timings, Usage
from frontend.request import Beam, Chat, Decoding, Options, Prompt, Sampling, TextRequest
from frontend.served import ServedModel
from frontend.text_delta import TextDelta, TextLogprob
from tidemill.runtime.errors import InvalidRequest, Unsupported
from tidemill.structured import Constraint
from tidemill.v1 import engine_pb2, text_pb2

_LOWEST = -9999.0
_ROLES = ("system", "developer", "user", "assistant", "tool")
Metadata = dict[str, str]


def to_text_request(
    request: text_pb2.TextServiceGenerateRequest | text_pb2.GenerateStreamRequest,
    metadata: Metadata,
) -> TextRequest:
    """The request behind Generate and GenerateStream."""
    options = to_options(request.options, metadata, echo=request.echo)
    prompts = (_prompt(request.prompt),)
    return TextRequest(prompts=prompts, options=options, suffix=request.suffix)


def to_chat_request(
    request: text_pb2.ChatRequest | text_pb2.ChatStreamRequest, metadata: Metadata
) -> TextRequest:
    """The request behind Chat and ChatStream."""
    options, chat = to_options(request.options, metadata), request.chat
    kwargs = to_plain(chat.chat_template_kwargs, "chat_template_kwargs")
    if chat.reasoning_effort:
        kwargs["reasoning_effort"] = chat.reasoning_effort
    prompt = to_conversation(
        request.messages,
        add_generation_prompt=chat.add_generation_prompt
        if chat.HasField("add_generation_prompt")
        else None,
        continue_final_message=chat.continue_final_message,
        template_kwargs=kwargs,
    )
    prompt = with_tools(prompt, chat)
    return TextRequest(prompts=(prompt,), options=options, prompt_param="messages")


def to_conversation(
    messages: Iterable[text_pb2.ChatMessage],
    *,
    add_generation_prompt: bool | None,
    continue_final_message: bool = False,
    template_kwargs: dict[str, Any],
) -> Chat:
    """Messages for the template; continuing a message implies no generation prompt."""
    plain = [_message(i, message) for i, message in enumerate(messages)]
    if not plain:
        raise InvalidRequest("messages is empty; it needs at least one message", param="messages")
    if add_generation_prompt is None:
        add_generation_prompt = not continue_final_message
    return Chat(
        messages=plain,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        template_kwargs=template_kwargs,
    )


def to_tokenize(request: text_pb2.TokenizeRequest) -> tuple[str | Chat, bool | None]:
    """What Tokenize encodes, and whether special tokens are added (None: the default)."""
    special = request.add_special_tokens if request.HasField("add_special_tokens") else None
    if request.WhichOneof("input") == "messages":
        asked = request.add_generation_prompt
        chat = to_conversation(
            request.messages.messages,
            add_generation_prompt=asked if request.HasField("add_generation_prompt") else None,
            template_kwargs=to_plain(request.chat_template_kwargs, "chat_template_kwargs"),
        )
        return chat, special
    for name in ("add_generation_prompt", "chat_template_kwargs"):
        if request.HasField(name):
            raise InvalidRequest(f"{name} needs messages; this request has a text", param=name)
    return request.text, special


def _beam(given: text_pb2.BeamSearch) -> Beam:
    penalty = given.length_penalty if given.HasField("length_penalty") else 1.0
    return Beam(given.width, penalty, given.early_stopping)


def to_options(given: text_pb2.TextOptions, metadata: Metadata, *, echo: bool = False) -> Options:
    """Options; raises Unsupported naming what this build does not serve."""
    logprobs, kept = given.logprobs, given.truncate_prompt_tokens
    return Options(
        model=given.model,
        n=given.n if given.HasField("n") else 1,
        best_of=given.best_of if given.HasField("best_of") else None,
        beam=_beam(given.beam_search) if given.HasField("beam_search") else None,
        sampling=_sampling(given.sampling),
        decoding=Decoding(
            method=given.decoding.method or None,
            params=to_plain(given.decoding.params, "decoding.params"),
        ),
        constraint=_constraint(given.constraint) if given.HasField("constraint") else None,
        bad_words=tuple(given.bad_words),
        stop=tuple(given.stop),
        stop_token_ids=tuple(given.stop_token_ids),
        ignore_eos=given.ignore_eos if given.HasField("ignore_eos") else None,
        include_stop_str_in_output=given.include_stop_str_in_output,
        skip_special_tokens=not given.HasField("skip_special_tokens") or given.skip_special_tokens,
        spaces_between_special_tokens=not given.HasField("spaces_between_special_tokens")
        or given.spaces_between_special_tokens,
        add_special_tokens=given.add_special_tokens
        if given.HasField("add_special_tokens")
        else None,
        logprobs=logprobs.top if logprobs.HasField("top") else None,
        prompt_logprobs=logprobs.prompt_top if logprobs.HasField("prompt_top") else None,
        echo=echo,
        truncate_prompt_tokens=kept if given.HasField("truncate_prompt_tokens") else None,
        truncation_side=given.truncation_side or "left",
        cache_salt=given.cache_salt,
        priority=priority_of(metadata),
        fairness_key=metadata.get("x-fairness-key", ""),
        emit_canvas=given.emit_canvas,
        user=given.user,
    )


def to_plain(struct: Struct, param: str) -> dict[str, Any]:
    """A Struct as JSON would be read: whole numbers become int.

    Raises InvalidRequest naming `param` for NaN and infinity, which JSON cannot hold.
    """
    try:
        plain = json_format.MessageToDict(struct)
    except ValueError as failure:
        raise InvalidRequest(f"{param}: {failure}; send finite numbers", param=param) from failure
    return {name: _whole(value) for name, value in plain.items()}


def usage_message(usage: Usage) -> engine_pb2.Usage:
    """Usage on the wire."""
    return engine_pb2.Usage(**usage._asdict(), tokens_per_forward=usage.tokens_per_forward)


def timings_message(timings: Timings) -> engine_pb2.Timings:
    """Timings on the wire."""
    return engine_pb2.Timings(**timings._asdict())


def logprob_messages(entries: Sequence[TextLogprob]) -> list[text_pb2.TextLogprobs]:
    """One message per scored token; tokens without a score (the first of a prompt) are left out."""
    return [
        text_pb2.TextLogprobs(chosen=_logprob(entry), top=map(_logprob, entry.top))
        for entry in entries
        if entry.logprob is not None
    ]


def canvas_message(delta: TextDelta, text: str) -> text_pb2.CanvasEvent:
    """The tentative state of a diffusion block."""
    canvas = delta.canvas
    assert canvas is not None, "a delta without a canvas"
    return text_pb2.CanvasEvent(
        index=delta.index,
        block=canvas.block,
        step=canvas.step,
        token_ids=canvas.token_ids,
        fixed=canvas.fixed,
        text=text,
        confidence=canvas.confidence,
    )


def model_card(model: ServedModel, name: str) -> text_pb2.ModelCard:
    """The served model's card under one of its names."""
    return text_pb2.ModelCard(
        id=name,
        created_unix_s=model.created,
        max_model_len=model.facts.max_model_len,
        owned_by="tidemill",
        default_method=model.facts.default_method,
        approximate_caches=model.facts.approximate_caches,
    )


def _prompt(prompt: text_pb2.Prompt) -> Prompt:
    if prompt.WhichOneof("content") == "tokens":
        return tuple(prompt.tokens.token_ids)
    return prompt.text


def _sampling(given: engine_pb2.SamplingParams) -> Sampling:
    repeated = ("logit_bias", "allowed_token_ids", "bad_words")
    scalars: dict[str, Any] = {
        field.name: value for field, value in given.ListFields() if field.name not in repeated
    }
    return Sampling(
        **scalars,
        logit_bias=dict(given.logit_bias),
        allowed_token_ids=tuple(given.allowed_token_ids),
        bad_words=tuple(tuple(one.token_ids) for one in given.bad_words),
    )


def _constraint(given: engine_pb2.Constraint) -> Constraint:
    kind = given.WhichOneof("grammar")
    if kind is None or (kind == "json_object" and not given.json_object):
        raise InvalidRequest(
            "constraint names no grammar; set one of its fields, or leave it out",
            param="constraint",
        )
    if kind == "json_object":
        return Constraint(kind, "", "constraint.json_object")
    value = list(given.choice.values) if kind == "choice" else getattr(given, kind)
    return Constraint.read(kind, value, f"constraint.{kind}")


def priority_of(metadata: Metadata) -> int:
    """What x-priority says; raises InvalidRequest where it is no number."""
    text = metadata.get("x-priority", "0")
    try:
        priority = int(text)
    except ValueError:
        priority = 2**31
    if not -(2**31) <= priority < 2**31:
        raise InvalidRequest(
            f"the metadata x-priority is {text[:40]!r}; it must be a 32-bit whole number",
            param="x-priority",
        )
    return priority


def _message(index: int, message: text_pb2.ChatMessage) -> dict[str, Any]:
    place = f"messages[{index}]"
    if message.role not in _ROLES:
        raise InvalidRequest(
            f"{place}.role is {message.role!r}; it must be one of {', '.join(_ROLES)}",
            param=f"{place}.role",
        )
    if not message.parts and not message.tool_calls and message.role != "assistant":
        raise InvalidRequest(f"{place}.parts is missing", param=f"{place}.parts")
    for part in message.parts:
        kind = part.WhichOneof("content")
        if kind is None:
            raise InvalidRequest(f"{place}.parts has an empty part", param=f"{place}.parts")
        if kind != "text":
            raise Unsupported(f"{place}.parts: {kind} is not served yet", param=f"{place}.parts")
    plain: dict[str, Any] = {
        "role": message.role,
        "content": "\n".join(part.text for part in message.parts),
    }
    if message.name:
        plain["name"] = message.name
    if message.tool_call_id:
        plain["tool_call_id"] = message.tool_call_id
    if message.reasoning:
        plain["reasoning_content"] = message.reasoning
    if message.tool_calls:
        plain["tool_calls"] = [_tool_call(c, place) for c in message.tool_calls]
    return plain


def _tool_call(call: text_pb2.ToolCall, place: str) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments_json}
    plain = {"type": "function", "id": call.id, "function": function}
    return with_arguments(plain, f"{place}.tool_calls")


def _logprob(entry: TextLogprob) -> text_pb2.TextLogprob:
    return text_pb2.TextLogprob(
        token=entry.token,
        logprob=_LOWEST if entry.logprob is None else max(entry.logprob, _LOWEST),
        token_bytes=entry.content,
        token_id=entry.token_id,
    )


def _whole(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {name: _whole(one) for name, one in value.items()}
    return [_whole(one) for one in value] if isinstance(value, list) else value
