"""The gate in front of every gRPC method but health. It does not know who is let in.

gRPC gives an interceptor the metadata but not the peer, so the question is asked around the
handler, in the task of its call; what the gate said travels in a context variable of that task.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any

import grpc

from frontend.api.grpc_around import around
from frontend.api.grpc_ingress import HEALTH, PROBES, arrival
from frontend.gate import Admitted, Gate
from tidemill.runtime.errors import ServiceError
from tidemill.runtime.rpc import abort

_ADMITTED: ContextVar[Admitted | None] = ContextVar("admitted", default=None)


def admitted() -> Admitted | None:
    """What the gate said of the call that runs in this task; None: it was not asked."""
    return _ADMITTED.get()


def admit(gate: Gate) -> None:
    """Lets the call of this task in, or one more request of it. Raises as the gate does."""
    call = arrival()
    shown = call.metadata.get("authorization", ""), call.metadata.get("x-api-key", "")
    said = gate.admit(call.client, *shown)
    call.caller = said.caller
    _ADMITTED.set(said)


class GateInterceptor(grpc.aio.ServerInterceptor):
    """Inside of the ingress and outside of everything else. What strangers send is not parsed."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler = await continuation(details)
        if handler is None or details.method.startswith(HEALTH) or details.method in PROBES:
            return handler
        return around(handler, self._admitted, parses_inside=True)

    @asynccontextmanager
    async def _admitted(self, context: Any) -> AsyncIterator[None]:
        try:
            admit(self._gate)
        except ServiceError as refused:
            await abort(context, refused)
        yield
