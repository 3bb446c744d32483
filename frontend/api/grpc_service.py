"""Puts a service on a gRPC server, by its descriptor. It does not know what its methods do."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Protocol

import grpc
from google.protobuf.message_factory import GetMessageClass

from tidemill.runtime.rpc import answering

Method = Callable[[Any, Any], Awaitable[Any]]
_MAKERS: Mapping[tuple[bool, bool], Callable[..., Any]] = MappingProxyType(
    {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }
)
"""By whether the client streams, and the server."""


class Servicer(Protocol):
    """Has a coroutine function for every method of its contract, under the method's name: from
    request (the call, where clients stream) and context to the answer. Streams are written with
    `context.write`."""

    contract: ClassVar[Any]
    """The service's descriptor."""


def add_service(server: grpc.aio.Server, servicer: Servicer) -> None:
    """Registers every method of the contract; all answer errors in the same way."""
    handlers = {}
    for method in servicer.contract.methods:
        handlers[method.name] = _MAKERS[method.client_streaming, method.server_streaming](
            _guarded(getattr(servicer, method.name)),
            request_deserializer=GetMessageClass(method.input_type).FromString,
            response_serializer=GetMessageClass(method.output_type).SerializeToString,
        )
    name = servicer.contract.full_name
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))


def _guarded(method: Method) -> Method:
    async def call(request: Any, context: Any) -> Any:
        async with answering(context):
            return await method(request, context)

    return call
