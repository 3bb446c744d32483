"""Something that stands around every call of a gRPC handler. It does not know any method."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

_KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
Around = Callable[[Any], AbstractAsyncContextManager[None]]
"""From the context of a call."""


def around(handler: Any, enter: Around, *, parses_inside: bool = False) -> Any:
    """`handler`, with each of its calls inside of `async with enter(context)`.

    `parses_inside`: the one request of a call is parsed there too, and not as soon as its bytes
    have come. Those of a stream are parsed where they are read.
    """
    kind = next(kind for kind in _KINDS if getattr(handler, kind) is not None)
    behaviour: Callable[[Any, Any], Any] = getattr(handler, kind)
    parses_inside = parses_inside and not handler.request_streaming
    parse = handler.request_deserializer if parses_inside else None

    async def generate(given: Any, context: Any) -> AsyncIterator[Any]:
        async with enter(context):
            async for answer in behaviour(parse(given) if parse else given, context):
                yield answer

    async def answer(given: Any, context: Any) -> Any:
        async with enter(context):
            answer: Awaitable[Any] = behaviour(parse(given) if parse else given, context)
            return await answer

    changed: dict[str, Any] = {kind: generate if inspect.isasyncgenfunction(behaviour) else answer}
    if parses_inside:
        changed["request_deserializer"] = None
    return handler._replace(**changed)
