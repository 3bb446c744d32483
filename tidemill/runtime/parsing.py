"""Answers bytes that are no message of the method with INVALID_ARGUMENT instead of UNKNOWN.

Only for methods with one request: a stream's handler meets the parse error where it reads, inside
`rpc.answering`. It does not know any message.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from tidemill.runtime.errors import InvalidRequest
from tidemill.runtime.rpc import abort


class _Malformed:
    """Stands for a request that could not be parsed."""


class MalformedRequests(grpc.aio.ServerInterceptor):
    """Interceptor for servers; gRPC parses before a handler runs, so no handler can do it."""

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler = await continuation(details)
        if handler is None or handler.request_streaming:
            return handler
        parse = _lenient(handler.request_deserializer)
        if handler.response_streaming:
            checked = _checked(handler.unary_stream)
            return handler._replace(request_deserializer=parse, unary_stream=checked)
        checked = _checked(handler.unary_unary)
        return handler._replace(request_deserializer=parse, unary_unary=checked)


def _lenient(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def parse_or_mark(content: bytes) -> Any:
        try:
            return parse(content)
        except DecodeError:
            return _Malformed()

    return parse_or_mark


def _checked(behaviour: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    async def generate(request: Any, context: Any) -> AsyncIterator[Any]:
        await _refuse(request, context)
        async for answer in behaviour(request, context):
            yield answer

    async def answer(request: Any, context: Any) -> Any:
        await _refuse(request, context)
        answer: Awaitable[Any] = behaviour(request, context)
        return await answer

    return generate if inspect.isasyncgenfunction(behaviour) else answer


async def _refuse(request: Any, context: Any) -> None:
    if isinstance(request, _Malformed):
        error = InvalidRequest(
            "malformed message: the bytes are no protobuf message of this method; build client "
            "and server from the same contract, send strings in UTF-8, and at most 100 messages "
            "inside of each other (of a Struct every object counts three)",
            reason="MALFORMED_MESSAGE",
        )
        await abort(context, error)
