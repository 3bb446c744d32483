"""Text in, text out over gRPC: `Client` for ordinary programs, `AsyncClient` for asyncio.

Errors are those of tidemill.runtime.errors, with the server's words. It does not know HTTP.

    with Client("127.0.0.1:50051") as client:
        print(client.chat("Reverse: abc").text)
        for delta in client.generate_stream("Once", SamplingParams(max_tokens=40)):
            print(delta.text, end="")

Tools go around once more for every answer that calls some:

    options = CallOptions(tools=[{"type": "function", "function": {"name": "now"}}])
    said = [{"role": "user", "content": "What time is it?"}]
    while calls := (answer := client.chat(said, options=options)).tool_calls:
        said.append({"role": "assistant", "content": answer.text, "tool_calls": calls})
        for call in calls:
            result = run(call.name, call.arguments)
            said.append({"role": "tool", "tool_call_id": call.id, "content": result})
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, closing
from types import TracebackType
from typing import Any

from tidemill.asked import Params
from tidemill.conversation import Conversation, Fields
from tidemill.exchange import (
    CallOptions,
    Completion,
    Delta,
    Filling,
    chat_fields,
    infill_fields,
    text_fields,
    to_completion,
    to_delta,
    to_filling,
    tokenize_fields,
)
from tidemill.filled import filled
from tidemill.given import ids_of
from tidemill.runtime.rpc import channel_options
from tidemill.sampling_params import SamplingParams
from tidemill.security.client_tls import ClientTls, open_blocking_channel, open_channel
from tidemill.transport import DEFAULT_RETRIES, AsyncCalls, Calls
from tidemill.v1 import text_pb2 as pb
from tidemill.v1 import text_pb2_grpc as rpc
from tidemill.vectors import AsyncPoolCalls, PoolCalls

DEFAULT_ADDRESS = "127.0.0.1:50051"
_MAX_MESSAGE_BYTES = 64 << 20


class Client(PoolCalls):
    """A blocking client. Thread-safe; use as a context manager or call `close`."""

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        max_retries: int = DEFAULT_RETRIES,
        api_key: str = "",
        tls: ClientTls | None = None,
    ) -> None:
        """`max_retries`: how often a call is sent again where the server refused it and said when
        to come back; within the call's `timeout_s`, never what an engine died of. `tls` None:
        plaintext."""
        self._channel = open_blocking_channel(address, channel_options(_MAX_MESSAGE_BYTES), tls)
        self._calls = Calls(rpc.TextServiceStub(self._channel), max_retries, api_key)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        failure: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends running calls."""
        self._channel.close()

    def generate(
        self,
        prompt: str | Sequence[int],
        params: Params | None = None,
        options: CallOptions | None = None,
    ) -> Completion:
        """Completes a text or token ids. Raises ServiceError."""
        request = filled(pb.TextServiceGenerateRequest, text_fields(prompt, params, options))
        return to_completion(self._call("Generate", request, options))

    def generate_stream(
        self,
        prompt: str | Sequence[int],
        params: Params | None = None,
        options: CallOptions | None = None,
    ) -> Iterator[Delta]:
        """The same in pieces; leaving the loop early stops the engine."""
        request = filled(pb.GenerateStreamRequest, text_fields(prompt, params, options))
        return self._stream("GenerateStream", request, options)

    def chat(
        self,
        messages: Conversation,
        params: Params | None = None,
        options: CallOptions | None = None,
    ) -> Completion:
        """Answers a conversation, with text, or calls of `options.tools`. Raises ServiceError."""
        request = filled(pb.ChatRequest, chat_fields(messages, params, options))
        return to_completion(self._call("Chat", request, options))

    def chat_stream(
        self,
        messages: Conversation,
        params: Params | None = None,
        options: CallOptions | None = None,
    ) -> Iterator[Delta]:
        """The same in pieces; leaving the loop early stops the engine."""
        request = filled(pb.ChatStreamRequest, chat_fields(messages, params, options))
        return self._stream("ChatStream", request, options)

    def infill(
        self,
        prefix: str,
        suffix: str,
        params: SamplingParams | None = None,
        options: CallOptions | None = None,
    ) -> Filling:
        """What stands between two texts, `params.max_tokens` tokens; diffusion models only."""
        request = filled(pb.InfillRequest, infill_fields((prefix, suffix), params, options))
        return to_filling(self._call("Infill", request, options))

    def tokenize(self, text: Conversation, *, add_special_tokens: bool | None = None) -> list[int]:
        """Token ids of a text, or of messages rendered with the chat template."""
        answer = self._call(
            "Tokenize", filled(pb.TokenizeRequest, tokenize_fields(text, add_special_tokens)), None
        )
        return list(answer.token_ids)

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids."""
        ids = ids_of("token_ids", token_ids, "token ids")
        given = {"token_ids": ids, "skip_special_tokens": skip_special_tokens}
        request = filled(pb.DetokenizeRequest, given)
        return str(self._call("Detokenize", request, None).text)

    def list_models(self) -> list[pb.ModelCard]:
        """What the server serves."""
        return list(self._call("ListModels", pb.ListModelsRequest(), None).models)

    def get_model(self, name: str) -> pb.ModelCard:
        """One model's card. Raises NotFound."""
        card: pb.ModelCard = self._call(
            "GetModel", filled(pb.GetModelRequest, {"id": name}), None
        ).model
        return card

    def _pooled(self, method: str, given: Fields, options: CallOptions | None) -> Any:
        return self._call(method, filled(getattr(pb, f"{method}Request"), given), options)

    def _call(self, method: str, request: Any, options: CallOptions | None) -> Any:
        return self._calls.answer(method, request, options)

    def _stream(self, method: str, request: Any, options: CallOptions | None) -> Iterator[Delta]:
        with closing(self._calls.stream(method, request, options)) as messages:
            for message in messages:
                yield to_delta(message)


class AsyncClient(AsyncPoolCalls):
    """A client for asyncio; make it inside the running loop. The methods are those of Client."""

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        max_retries: int = DEFAULT_RETRIES,
        api_key: str = "",
        tls: ClientTls | None = None,
    ) -> None:
        self._channel = open_channel(address, channel_options(_MAX_MESSAGE_BYTES), tls)
        self._calls = AsyncCalls(rpc.TextServiceStub(self._channel), max_retries, api_key)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        failure: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends running calls."""
        await self._channel.close()

    async def generate(
        self,
        prompt: str | Sequence[int],
        params: Params | None = None,
        options: CallOptions | None = None,
    ) -> Completion:
        """Completes a text or token ids. Raises ServiceError."""
        request = filled(pb.TextServiceGenerateRequest, text_fields(prompt, params, options))
        return to_completion(await self._call("Generate", request, options))

    def generate_stream(
        self,
        prompt: str | Sequence[int],
        params: Params | None = None,
        options: CallOptions | None = None,
    ) -> AsyncIterator[Delta]:
        """The same in pieces; leaving the loop early stops the engine."""
        request = filled(pb.GenerateStreamRequest, text_fields(prompt, params, options))
        return self._stream("GenerateStream", request, options)

    async def chat(
        self,
        messages: Conversation,
        params: Params | None = None,
        options: CallOptions | None = None,
    ) -> Completion:
        """Answers a conversation, with text, or calls of `options.tools`. Raises ServiceError."""
        request = filled(pb.ChatRequest, chat_fields(messages, params, options))
        return to_completion(await self._call("Chat", request, options))

    def chat_stream(
        self,
        messages: Conversation,
        params: Params | None = None,
        options: CallOptions | None = None,
    ) -> AsyncIterator[Delta]:
        """The same in pieces; leaving the loop early stops the engine."""
        request = filled(pb.ChatStreamRequest, chat_fields(messages, params, options))
        return self._stream("ChatStream", request, options)

    async def infill(
        self,
        prefix: str,
        suffix: str,
        params: SamplingParams | None = None,
        options: CallOptions | None = None,
    ) -> Filling:
        """What stands between two texts, `params.max_tokens` tokens; diffusion models only."""
        request = filled(pb.InfillRequest, infill_fields((prefix, suffix), params, options))
        return to_filling(await self._call("Infill", request, options))

    async def tokenize(
        self, text: Conversation, *, add_special_tokens: bool | None = None
    ) -> list[int]:
        """Token ids of a text, or of messages rendered with the chat template."""
        answer = await self._call(
            "Tokenize", filled(pb.TokenizeRequest, tokenize_fields(text, add_special_tokens)), None
        )
        return list(answer.token_ids)

    async def detokenize(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> str:
        """The text of token ids."""
        ids = ids_of("token_ids", token_ids, "token ids")
        given = {"token_ids": ids, "skip_special_tokens": skip_special_tokens}
        request = filled(pb.DetokenizeRequest, given)
        return str((await self._call("Detokenize", request, None)).text)

    async def list_models(self) -> list[pb.ModelCard]:
        """What the server serves."""
        return list((await self._call("ListModels", pb.ListModelsRequest(), None)).models)

    async def get_model(self, name: str) -> pb.ModelCard:
        """One model's card. Raises NotFound."""
        card: pb.ModelCard = (
            await self._call("GetModel", filled(pb.GetModelRequest, {"id": name}), None)
        ).model
        return card

    async def _pooled(self, method: str, given: Fields, options: CallOptions | None) -> Any:
        return await self._call(method, filled(getattr(pb, f"{method}Request"), given), options)

    async def _call(self, method: str, request: Any, options: CallOptions | None) -> Any:
        return await self._calls.answer(method, request, options)

    async def _stream(
        self, method: str, request: Any, options: CallOptions | None
    ) -> AsyncIterator[Delta]:
        async with aclosing(self._calls.stream(method, request, options)) as messages:
            async for message in messages:
                yield to_delta(message)
