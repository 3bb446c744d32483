"""Streamed chats and completions of tidemill.v1.TextService over gRPC.

It does not know when requests begin.
"""

from __future__ import annotations

import itertools
import time
from typing import Any
from urllib.parse import urlsplit

import grpc

from tidemill.bench.traffic.answer import CONNECTION, OK, Answer
from tidemill.bench.traffic.asked import Asked
from tidemill.bench.traffic.target import Target
from tidemill.exchange import CallOptions, chat_fields, text_fields
from tidemill.runtime.rpc import channel_options
from tidemill.sampling_params import SamplingParams
from tidemill.security.client_tls import open_channel
from tidemill.v1 import text_pb2 as pb
from tidemill.v1 import text_pb2_grpc as rpc

_CONNECTIONS = 4
"""One HTTP/2 connection is one thread's work on the server's side."""
_MAX_MESSAGE_BYTES = 64 << 20
_SAID_CHARS = 300
_NOT_REACHED = "failed to connect"
"""How gRPC begins to tell that no connection was made, in the words of its status."""
_LOST = grpc.StatusCode.UNAVAILABLE
"""Also what gRPC itself says of a connection that broke; a server that refuses adds why."""


def channel(target: Target, url: str, *options: tuple[str, int]) -> grpc.aio.Channel:
    """A channel to one address. Raises FailedPrecondition for certificates that do not serve."""
    every = [*channel_options(_MAX_MESSAGE_BYTES), *options]
    return open_channel(urlsplit(url).netloc, every, target.tls_of(url))


def key_metadata(target: Target) -> tuple[tuple[str, str], ...]:
    """The key as the server reads it."""
    return (("authorization", f"Bearer {target.api_key}"),) if target.api_key else ()


class GrpcFace:
    """A few connections to one server, used in turn."""

    def __init__(self, target: Target, url: str) -> None:
        self._target = target
        own = ("grpc.use_local_subchannel_pool", 1)
        self._channels = [channel(target, url, own) for _ in range(_CONNECTIONS)]
        stubs = [rpc.TextServiceStub(one) for one in self._channels]
        methods = [one.ChatStream if target.is_chat else one.GenerateStream for one in stubs]
        self._methods = itertools.cycle(methods)
        self._metadata = key_metadata(target)

    def write(self, asked: Asked) -> Any:
        """The request message."""
        target = self._target
        params = SamplingParams(
            temperature=target.temperature,
            max_tokens=asked.output_len,
            ignore_eos=target.ignore_eos,
        )
        options = CallOptions(model=target.model)
        if target.is_chat:
            return pb.ChatStreamRequest(**chat_fields(asked.messages or [], params, options))
        return pb.GenerateStreamRequest(**text_fields(asked.prompt, params, options))

    async def ask(self, content: Any, answer: Answer) -> None:
        """Raises ConnectionError when the server was not reached; every other end stands in
        `answer`."""
        call = next(self._methods)(content, timeout=self._target.timeout_s, metadata=self._metadata)
        try:
            while (message := await call.read()) is not grpc.aio.EOF:
                self._take(message, answer)
        except grpc.aio.AioRpcError as failure:
            said = failure.details() or ""
            if said.startswith(_NOT_REACHED):
                raise ConnectionError(said) from failure
            is_lost = failure.code() is _LOST and not failure.trailing_metadata()
            answer.status = CONNECTION if is_lost else failure.code().name
            answer.said = said[:_SAID_CHARS]
        else:
            answer.status = OK
        finally:
            answer.ended = time.monotonic()
            call.cancel()
        answer.output_tokens = answer.output_tokens or len(answer.chunks)

    def _take(self, message: Any, answer: Answer) -> None:
        if message.HasField("usage"):
            answer.input_tokens = message.usage.prompt_tokens
            answer.output_tokens = message.usage.output_tokens
        if message.HasField("choice") and self._has_text(message.choice):
            answer.chunks.append(time.monotonic())

    def _has_text(self, choice: Any) -> bool:
        if not self._target.is_chat:
            return bool(choice.text)
        said = choice.message
        return bool(said.reasoning or said.tool_calls or any(part.text for part in said.parts))

    async def close(self) -> None:
        for one in self._channels:
            await one.close()
