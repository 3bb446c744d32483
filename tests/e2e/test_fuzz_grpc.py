"""Whatever message a method is sent, it answers or says what is wrong: no INTERNAL, no hang.

Messages are drawn from the contract's descriptors: one that is served, with some fields drawn anew,
or any. A new method is drawn for as soon as it stands in the contract.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf import json_format
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message_factory import GetMessageClass
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.e2e.messages_drawn import draw_message, vary
from tests.e2e.real_stack import HOST, Stack, connected, good, until_idle
from tidemill.v1 import engine_pb2, text_pb2

NUM_MESSAGES = 60
"""For each method."""
LONG_S, SHORT_S, MOMENT_S = 30.0, 2.0, 0.2
"""What answers at once has long: it is a hang if it takes that. What generates may go on for
thousands of tokens, if it is asked to; that its time is up ends it everywhere, which is checked."""
IDS = "BQAAAAYAAAA="
FEW = {"sampling": {"maxTokens": 3}}
CHAT = {"messages": [{"role": "user", "parts": [{"text": "hi"}]}], "options": FEW}
TEXT = {"prompt": {"text": "a"}, "options": FEW}
SPEC = {"promptTokenIds": IDS, "sampling": {"maxTokens": 3, "temperature": 0.5}}
SERVED: dict[str, dict[str, Any]] = {
    "TextService.Generate": TEXT,
    "TextService.GenerateStream": TEXT,
    "TextService.Chat": CHAT,
    "TextService.ChatStream": CHAT,
    "TextService.Infill": {"prefix": "a", "suffix": "b", "gapTokens": 2, "options": {}},
    "TextService.Embed": {"inputs": [{"text": "a"}]},
    "TextService.Score": {"pairs": [{"left": "a", "right": "b"}]},
    "TextService.Rerank": {"query": "a", "documents": ["b", "c"]},
    "TextService.Tokenize": {"text": "a"},
    "TextService.Detokenize": {"tokenIds": [5]},
    "TextService.GetModel": {"id": "demo"},
    "EngineService.Generate": {"spec": SPEC},
    "EngineService.Pool": {"promptTokenIds": IDS},
    "EngineService.Abort": {"requestIds": ["a"]},
}
HELLO = {"hello": {"protocolMajor": 1}}
SUBMIT = {"submit": {"handle": 1, "spec": SPEC}}
OPEN = {"open": {"promptTokenIds": IDS}}
STREAMED = {
    "EngineService.Session": (HELLO, SUBMIT),
    "KvTransferService.Transfer": (OPEN, {"taken": {}}),
}
"""The first frame that is served, and one behind it."""
ENDLESS = {"WatchState", "Subscribe"}
"""Answers until the client leaves; of an idle engine's prefix index there is nothing to tell."""
BUGS = {
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.DATA_LOSS,
    grpc.StatusCode.UNAVAILABLE,
}


def methods(module: Any) -> dict[str, MethodDescriptor]:
    services = module.DESCRIPTOR.services_by_name.values()
    return {f"{s.name}.{m.name}": m for s in services for m in s.methods}


METHODS = {**methods(text_pb2), **methods(engine_pb2)}
ASKED = [name for name in METHODS if name not in STREAMED]


@pytest.fixture(scope="module")
def channels(stack: Stack) -> Iterator[dict[str, grpc.Channel]]:
    with (
        grpc.insecure_channel(f"{HOST}:{stack.grpc_port}") as text,
        grpc.insecure_channel(f"{HOST}:{stack.port}") as engine,
    ):
        yield {"text": text, "engine": engine}


def caller(channels: dict[str, grpc.Channel], method: MethodDescriptor) -> Any:
    service = method.containing_service
    channel = channels["text" if service.name == "TextService" else "engine"]
    kinds = {(False, False): "unary_unary", (False, True): "unary_stream"}
    kind = kinds.get((method.client_streaming, method.server_streaming), "stream_stream")
    return getattr(channel, kind)(
        f"/{service.full_name}/{method.name}",
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=GetMessageClass(method.output_type).FromString,
    )


def status_of(call: Any, method: MethodDescriptor, request: Any, timeout: float) -> Any:
    """The status that a call ends with."""
    try:
        if not method.server_streaming:
            call(request, timeout=timeout)
            return grpc.StatusCode.OK
        answers = call(request, timeout=timeout)
        for answer in answers:
            if method.name in ENDLESS:
                answers.cancel()
                return grpc.StatusCode.OK
            if method.name == "Session" and answer.HasField("failed"):
                assert answer.failed.code not in {code.value[0] for code in BUGS}, answer
        return answers.code()
    except grpc.RpcError as failure:
        return failure.code()


async def still_serves(stack: Stack) -> None:
    async with connected(stack) as faces:
        await good(faces)
        await until_idle(faces)


def test_every_method_has_a_message_that_is_served() -> None:
    empty = {name for name, one in METHODS.items() if not one.input_type.fields}
    others = {*STREAMED}
    unserved = {name for name in METHODS if name.startswith(("Admin", "KvEvent"))}
    assert METHODS.keys() == {*SERVED} | empty | others | unserved


@pytest.mark.parametrize("name", ASKED)
def test_no_message_is_too_strange(
    stack: Stack, channels: dict[str, grpc.Channel], name: str
) -> None:
    method = METHODS[name]
    call, kind = caller(channels, method), GetMessageClass(method.input_type)
    generates = any(word in name for word in ("Generate", "Chat", "Infill"))
    may_wait = generates or method.name == "Subscribe"
    timeout = SHORT_S if generates else MOMENT_S if may_wait else LONG_S
    served = json_format.ParseDict(SERVED.get(name, {}), kind())
    code = grpc.StatusCode
    refused = {code.UNIMPLEMENTED, code.INVALID_ARGUMENT, code.NOT_FOUND}
    if name in SERVED and not name.endswith(("Infill", "Score", "Rerank")):
        assert status_of(call, method, served, LONG_S) is grpc.StatusCode.OK, name
    seen = set()

    @settings(max_examples=NUM_MESSAGES)
    @given(st.data())
    def ask(data: st.DataObject) -> None:
        request = kind()
        if data.draw(st.integers(0, 3)):
            request.CopyFrom(served)
            vary(data.draw, request)
        else:
            request.CopyFrom(draw_message(data.draw, method.input_type))
        began = time.monotonic()
        status = status_of(call, method, request, timeout)
        assert status not in BUGS, (status, request)
        assert may_wait or time.monotonic() - began < timeout, request
        seen.add(status)

    ask()
    takes_all = "Abort" in name or method.name in ENDLESS
    assert seen & refused or not method.input_type.fields or takes_all, seen
    asyncio.run(still_serves(stack))


@pytest.mark.parametrize(
    ("name", "ends"),
    [
        ("EngineService.Session", {grpc.StatusCode.OK, grpc.StatusCode.FAILED_PRECONDITION}),
        # This engine hands no prompts over; one that does is asked in tests/service.
        ("KvTransferService.Transfer", {grpc.StatusCode.FAILED_PRECONDITION}),
    ],
)
def test_no_frame_is_too_strange(
    stack: Stack, channels: dict[str, grpc.Channel], name: str, ends: set[Any]
) -> None:
    method = METHODS[name]
    call, seen = caller(channels, method), set()
    kind = GetMessageClass(method.input_type)
    first, then = (json_format.ParseDict(one, kind()) for one in STREAMED[name])

    @settings(max_examples=2 * NUM_MESSAGES)
    @given(st.data())
    def talk(data: st.DataObject) -> None:
        frames = [first] if data.draw(st.integers(0, 4)) else []
        for _ in range(data.draw(st.integers(0, 5))):
            frame = kind()
            frame.CopyFrom(then)
            if data.draw(st.booleans()):
                frame = draw_message(data.draw, method.input_type)
            else:
                vary(data.draw, frame)
            frames.append(frame)
        status = status_of(call, method, iter(frames), SHORT_S)
        assert status not in BUGS, (status, frames)
        seen.add(status)

    talk()
    assert ends <= seen, seen
    asyncio.run(still_serves(stack))


def test_control_a_bug_would_be_seen() -> None:
    async def fail(request: bytes, context: Any) -> bytes:
        raise ValueError

    async def run() -> Any:
        server = grpc.aio.server()
        handler = {"m": grpc.unary_unary_rpc_method_handler(fail)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("s", handler),))
        port = server.add_insecure_port(f"{HOST}:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"{HOST}:{port}") as channel:
            code = await channel.unary_unary("/s/m")(b"").code()
        await server.stop(0)
        return code

    assert asyncio.run(run()) in BUGS
