"""The gate in front of every gRPC method but health. It does not know who is let in.

gRPC gives an interceptor the metadata but not the peer, so the question is asked around the
handler, in the task of its call; what the gate said travels in a context variable of that task.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from typing import Any

import grpc

from frontend.gate import Admitted, Gate
from tidemill.runtime.errors import ServiceError
from tidemill.runtime.rpc import abort
from tidemill.security.addresses import peer_address

_LOG = logging.getLogger("tidemill.frontend.grpc")
_HEALTH = "/grpc.health.v1.Health/"
_OIP = "/inference.GRPCInferenceService/"
_OPEN = frozenset({f"{_OIP}ServerLive", f"{_OIP}ServerReady"})
"""Yes or no, for probes."""
_ADMITTED: ContextVar[Admitted | None] = ContextVar("admitted", default=None)
_KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


def admitted() -> Admitted | None:
    """What the gate said of the call that runs in this task; None: it was not asked."""
    return _ADMITTED.get()


def client_of(gate: Gate, context: Any, metadata: dict[str, str]) -> str:
    """The client's address."""
    return gate.client(peer_address(context.peer()), metadata.get("x-forwarded-for", ""))


class GateInterceptor(grpc.aio.ServerInterceptor):
    """Inside of no other one, so that nothing is parsed for strangers."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler = await continuation(details)
        method = details.method
        if handler is None or method.startswith(_HEALTH) or method in _OPEN:
            return handler
        kind = next(kind for kind in _KINDS if getattr(handler, kind) is not None)
        return handler._replace(**{kind: self._gated(getattr(handler, kind), method)})

    def _gated(
        self, behaviour: Callable[[Any, Any], Any], method: str
    ) -> Callable[[Any, Any], Any]:
        async def generate(given: Any, context: Any) -> AsyncIterator[Any]:
            await self._admit(context, method)
            async for answer in behaviour(given, context):
                yield answer

        async def answer(given: Any, context: Any) -> Any:
            await self._admit(context, method)
            answer: Awaitable[Any] = behaviour(given, context)
            return await answer

        return generate if inspect.isasyncgenfunction(behaviour) else answer

    async def _admit(self, context: Any, method: str) -> None:
        metadata = {k: v for k, v in context.invocation_metadata() if isinstance(v, str)}
        client = client_of(self._gate, context, metadata)
        try:
            said = self._gate.admit(
                client, metadata.get("authorization", ""), metadata.get("x-api-key", "")
            )
        except ServiceError as refused:
            _LOG.info("%s %s", method, refused.reason, extra={"client": client})
            await abort(context, refused)
        else:
            _ADMITTED.set(said)
