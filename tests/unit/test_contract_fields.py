"""No field is silently dropped: each of the contract changes what happens, or is refused by name.

The walk goes through the descriptors, so that a new field fails here until it is dealt with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from engine_service.server.convert import to_choices, to_submit
from engine_service.server.convert_out import pack
from engine_service.server.convert_pool import to_pool_submit
from frontend.api import grpc_text_convert as convert
from frontend.api.grpc_text import TextServicer
from frontend.api.grpc_text_infill import to_infill_request
from frontend.api.grpc_text_pool import to_embed_request, to_rerank_request, to_score_request
from frontend.config import FrontendConfig
from frontend.gate import Gate
from tidemill.runtime.errors import InvalidRequest, ServiceError, Unsupported
from tidemill.v1 import engine_pb2, text_pb2

HINTS = {
    "prompt_digest": "for routers between frontend and engine",
    "group": "for routers between frontend and engine",
    "spec.prompt_digest": "for routers between frontend and engine",
    "spec.group": "for routers between frontend and engine",
}
"""Accepted without effect, and the contract says so."""

ELSEWHERE = {
    "traceparent": "test_engine_session: the trace goes beside the request",
    "tracestate": "test_engine_session: the trace goes beside the request",
    "spec.traceparent": "test_engine_session: the trace goes beside the request",
    "spec.tracestate": "test_engine_session: the trace goes beside the request",
    "options.return_token_ids": "test_frontend_grpc: shapes the answer",
}
"""Used behind the conversion, and tested there."""

SPECIAL: dict[str, Any] = {
    "reasoning.lark": "start: @answer",
    "spec.reasoning.lark": "start: @answer",
    "prompt_token_ids": pack([7]),
    "spec.prompt_token_ids": pack([7]),
    "options.skip_special_tokens": False,
    "options.spaces_between_special_tokens": False,
    "chat.add_generation_prompt": False,
    "chat.tools": [{"name": "g"}],
    "chat.tool_choice.mode": "required",
    "chat.tool_choice.function_name": "f",
    "chat.parallel_tool_calls": False,
    "skip_special_tokens": False,
    "messages": [{"role": "user", "parts": [{"text": "other"}]}],
    "messages.messages": [{"role": "user", "parts": [{"text": "other"}]}],
}
"""Values for fields whose type does not suggest one that asks for anything."""

OPAQUE = {"google.protobuf.Struct"}


def leaves(kind: Descriptor, prefix: str = "") -> Iterator[tuple[str, FieldDescriptor]]:
    """Every field below `kind`; repeated messages and maps count as one."""
    for field in kind.fields:
        path, inner = prefix + field.name, field.message_type
        if inner is None or field.is_repeated or inner.full_name in OPAQUE:
            yield path, field
        else:
            yield from leaves(inner, path + ".")


def example(field: FieldDescriptor) -> Any:
    """A value that asks for something."""
    inner = field.message_type
    if inner is not None and inner.GetOptions().map_entry:
        value = inner.fields_by_name["value"]
        return {example(inner.fields_by_name["key"]): {} if value.message_type else example(value)}
    if inner is not None:
        return [{}] if field.is_repeated else {"a": 1}
    values = {
        FieldDescriptor.CPPTYPE_STRING: "x",
        FieldDescriptor.CPPTYPE_BOOL: True,
        FieldDescriptor.CPPTYPE_FLOAT: 0.5,
    }
    value: Any = b"x" if field.type == FieldDescriptor.TYPE_BYTES else None
    value = values.get(field.cpp_type, 3) if value is None else value
    return [value] if field.is_repeated else value


def put(message: Message, path: str, value: Any) -> None:
    """Sets the field at `path`; the messages above it are made."""
    *above, name = path.split(".")
    for part in above:
        message = getattr(message, part)
    message.SetInParent()
    type_ = type(message)
    if isinstance(value, list | dict):
        message.ClearField(name)
    message.MergeFrom(type_(**{name: value}))


def dropped(
    base: Message, read: Callable[[Any], object], hints: dict[str, str] = HINTS
) -> list[str]:
    """Fields that `read` neither uses nor refuses by name, nor are they known hints."""
    before, found = read(base), []
    for path, field in leaves(base.DESCRIPTOR):
        changed = type(base)()
        changed.CopyFrom(base)
        put(changed, path, SPECIAL.get(path, example(field)))
        try:
            is_used = read(changed) != before
        except Unsupported as refused:
            is_used = bool(refused.param) and (refused.param or "").split(".")[-1] in path
        if not is_used and path not in hints and path not in ELSEWHERE:
            found.append(path)
    return found


def of_spec(spec: engine_pb2.GenerateSpec) -> object:
    return dataclasses.replace(to_submit(spec), arrival_ns=0, deadline_ns=spec.timeout_ms)


def of_call(request: engine_pb2.GenerateRequest) -> object:
    submits = to_choices(request, None)
    return [dataclasses.replace(one, arrival_ns=0, request_id="") for one in submits], (
        request.spec.request_id,
        submits[0].deadline_ns is not None,
    )


SPEC = engine_pb2.GenerateSpec(
    request_id="base",
    prompt_token_ids=pack([1]),
    constraint=engine_pb2.Constraint(regex="a"),
    reasoning=engine_pb2.Reasoning(end="b"),  # which nothing but its end allows
)
TEXT = {"prompt": {"text": "base"}}
CHAT = {"messages": [{"role": "assistant", "parts": [{"text": "a"}]}]}
CALLING = {**CHAT, "chat": {"tools": [{"name": "f"}]}}


def of_pool(request: engine_pb2.PoolRequest) -> object:
    submit = to_pool_submit(request, None)
    return dataclasses.replace(submit, arrival_ns=0, deadline_ns=request.timeout_ms)


def of_text(request: Any) -> object:
    return convert.to_text_request(request, {})


def of_infill(request: Any) -> object:
    return to_infill_request(request, {})


def of_chat(request: Any) -> object:
    return convert.to_chat_request(request, {})


def test_specs_of_the_engine() -> None:
    assert dropped(SPEC, of_spec) == []
    assert dropped(engine_pb2.GenerateRequest(spec=SPEC), of_call) == []


def test_pool_requests() -> None:
    base = engine_pb2.PoolRequest(request_id="base", prompt_token_ids=pack([1]))
    assert dropped(base, of_pool) == []


@pytest.mark.parametrize("kind", ["TextServiceGenerateRequest", "GenerateStreamRequest"])
def test_text_requests(kind: str) -> None:
    assert dropped(getattr(text_pb2, kind)(**TEXT), of_text) == []


def test_infill_requests() -> None:
    assert dropped(text_pb2.InfillRequest(prefix="a", suffix="b", gap_tokens=1), of_infill) == []


def test_requests_of_hidden_states() -> None:
    ranked = {"top_n": "test_frontend_embeddings: shapes the answer"}
    base: Message = text_pb2.EmbedRequest(inputs=[{"text": "a"}])
    assert dropped(base, lambda one: to_embed_request(one, {})) == []
    assert dropped(text_pb2.ScoreRequest(), lambda one: to_score_request(one, {})) == []
    base = text_pb2.RerankRequest(query="a", documents=["b"])
    assert dropped(base, lambda one: to_rerank_request(one, {}), ranked) == []
    first = text_pb2.ScoreRequest()
    assert to_score_request(first, {"x-priority": "7"}).priority == 7


@pytest.mark.parametrize("kind", ["ChatRequest", "ChatStreamRequest"])
def test_chat_requests(kind: str) -> None:
    assert dropped(getattr(text_pb2, kind)(**CALLING), of_chat) == []


def test_messages() -> None:
    """Fields of one message, and of its parts and calls."""
    message = text_pb2.ChatMessage(role="assistant", parts=[{"text": "a"}])

    def read(one: Any) -> object:
        return of_chat(text_pb2.ChatRequest(messages=[one]))

    values = {
        "role": "user",
        "parts": [{"text": "b"}],
        "tool_calls": [{"id": "1", "name": "f", "arguments_json": "{}"}],
    }
    for path, field in leaves(message.DESCRIPTOR):
        changed = text_pb2.ChatMessage()
        changed.CopyFrom(message)
        put(changed, path, values.get(path, example(field)))
        assert read(changed) != read(message), path
    parts = {path for path, _ in leaves(text_pb2.ContentPart.DESCRIPTOR)}
    for path in parts - {"text"}:
        with pytest.raises(Unsupported, match=path):
            read(text_pb2.ChatMessage(role="user", parts=[{path: "x"}]))
    called = dict(values["tool_calls"][0])  # type: ignore[arg-type]
    before = read(text_pb2.ChatMessage(role="assistant", tool_calls=[called]))
    for path, _ in leaves(text_pb2.ToolCall.DESCRIPTOR):
        if path == "index":
            continue  # numbers the pieces of a streamed call; a whole call in a list needs none
        other = {**called, path: '{"a": 1}'}
        assert read(text_pb2.ChatMessage(role="assistant", tool_calls=[other])) != before, path


class Desk:
    """Notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[object] = []

    def model_for(self, name: str) -> Any:
        self.asked.append(name)
        facts = type("Facts", (), {"max_model_len": 1})
        return type("Model", (), {"facts": facts})

    async def tokenize(self, model: Any, *given: object) -> list[int]:
        self.asked.append(given)
        return []

    async def detokenize(self, model: Any, *given: object, **flags: object) -> str:
        self.asked += [given, flags]
        return ""


def of_method(name: str) -> Callable[[Any], object]:
    def read(request: Any) -> object:
        desk = Desk()
        servicer = TextServicer(desk, Gate(FrontendConfig()))  # type: ignore[arg-type]
        step = getattr(servicer, name)(request, None)
        try:
            step.send(None)
        except StopIteration:
            pass
        except ServiceError as refused:
            if isinstance(refused, Unsupported):
                raise
            desk.asked.append(refused.param)
        return desk.asked

    return read


def test_tokenize_and_detokenize() -> None:
    for base in (
        text_pb2.TokenizeRequest(text="base"),
        text_pb2.TokenizeRequest(messages=CHAT, add_generation_prompt=False),
    ):
        assert dropped(base, of_method("Tokenize")) == []
    base = text_pb2.DetokenizeRequest(token_ids=[1])
    assert dropped(base, of_method("Detokenize")) == []


def test_frames_of_a_session() -> None:
    """What Session reads, frame by frame; a new field must be added there, and here."""
    used = {
        "hello.protocol_major", "hello.protocol_minor", "hello.client_version",
        "hello.client_name", "submit.handle", "abort.handles", "stop_matched.handle",
        "stop_matched.completion_tokens", "stop_matched.stop_string", "ping.nonce",
    }  # fmt: skip
    hints = {"hello.features"}
    found = {path for path, _ in leaves(engine_pb2.SessionRequest.DESCRIPTOR)}
    assert {path for path in found if not path.startswith("submit.spec.")} == used | hints


def test_the_walk_notices_a_dropped_field() -> None:
    """Negative control: without the list of hints, they are found."""
    assert dropped(SPEC, of_spec, {}) == ["prompt_digest", "group"]
    forgetful = dropped(SPEC, lambda spec: None)
    assert {"sampling.temperature", "logprobs.prompt_top", "constraint.regex"} <= set(forgetful)


def test_an_answer_without_text_may_be_sent_back() -> None:
    """It ended within its reasoning, or at once."""
    said = text_pb2.ChatMessage(role="assistant", reasoning="hm")
    asked = text_pb2.ChatMessage(role="user", parts=[text_pb2.ContentPart(text="q")])
    request = text_pb2.ChatRequest(messages=[asked, said, asked])
    chat: Any = of_chat(request)
    assert [one["role"] for one in chat.prompts[0].messages] == ["user", "assistant", "user"]
    with pytest.raises(InvalidRequest, match="parts is missing"):
        of_chat(text_pb2.ChatRequest(messages=[text_pb2.ChatMessage(role="user")]))
