"""The engine's Pool as the frontend asks for it: one prompt in, one vector out.

It does not know text. Every prompt is a call of its own on the session's channel.
"""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import dataclass
from typing import Any

import grpc

from frontend.engine_client import EngineClient
from frontend.messages import Usage
from tidemill.runtime.errors import ServiceError
from tidemill.runtime.rpc import to_error
from tidemill.telemetry.context import TraceContext
from tidemill.v1 import engine_pb2 as pb
from tidemill.v1 import engine_pb2_grpc as rpc

_TASKS = {
    "embed": pb.POOL_TASK_EMBED,
    "classify": pb.POOL_TASK_CLASSIFY,
    "score": pb.POOL_TASK_SCORE,
}
_NOBODY = grpc.StatusCode.UNAVAILABLE.name
"""The reason of an error that no engine gave one to."""
_NOTICE_S = 1.0
"""How much later than a call the session of the same engine may notice that it has died."""
_GRACE_S = 1.0
"""How much longer than the deadline we wait for the engine's own word that it passed."""
_FOR_EVER_S = 1e9
"""gRPC counts in nanoseconds, which overflow from 1e10 s on: it takes such a deadline for past."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPrompt:
    """One prompt; `packed` is little-endian uint32 token ids."""

    packed: bytes
    task: str
    pair_start: int | None
    dimensions: int | None
    normalize: bool | None
    priority: int


async def pool_prompt(
    engine: EngineClient,
    prompt: PoolPrompt,
    *,
    request_id: str,
    timeout_ms: int | None,
    trace: TraceContext | None,
) -> tuple[array[float], Usage]:
    """The vector and what it cost. Raises the engine's ServiceError, and InvalidRequest for what no
    message holds; leaving early aborts it."""
    engine.check_ready()
    request = pb.PoolRequest(
        request_id=request_id,
        prompt_token_ids=prompt.packed,
        task=_TASKS[prompt.task],
        normalize=prompt.normalize,
        dimensions=prompt.dimensions,
        timeout_ms=timeout_ms,
        pair_start=prompt.pair_start,
        priority=prompt.priority,
    )
    if trace is not None:
        request.traceparent, request.tracestate = trace.traceparent, trace.state
    engine.limit.check(request)
    timeout_s = None if timeout_ms is None else min(timeout_ms / 1000 + _GRACE_S, _FOR_EVER_S)
    engine.num_pooling += 1
    try:
        answer = await _unless_lost(engine, request, timeout_s)
    except grpc.RpcError as failure:
        raise _named(to_error(failure)) from failure
    finally:
        engine.num_pooling -= 1
    used = answer.usage
    usage = Usage(
        prompt_tokens=used.prompt_tokens,
        cached_tokens=used.cached_tokens,
        forward_passes=used.forward_passes,
        preemptions=used.preemptions,
    )
    return array("f", answer.values), usage


async def _unless_lost(engine: EngineClient, request: pb.PoolRequest, timeout_s: Any) -> Any:
    """The answer. Raises EngineDead when the session is lost before: an engine that has vanished
    without a word is found out there, much sooner than by gRPC."""
    lost = engine.lost
    call = rpc.EngineServiceStub(engine.channel).Pool(request, timeout=timeout_s)
    answer, watch = asyncio.ensure_future(_answer(call)), asyncio.ensure_future(lost.wait())
    try:
        await asyncio.wait({answer, watch}, return_when=asyncio.FIRST_COMPLETED)
        if answer.done() and _is_cut(answer):
            await asyncio.wait({watch}, timeout=_NOTICE_S)
        if not answer.done() or answer.cancelled() or (lost.is_set() and _is_cut(answer)):
            raise engine.loss()
        return answer.result()
    finally:
        watch.cancel()
        answer.cancel()
        call.cancel()
        await asyncio.gather(answer, watch, return_exceptions=True)


def _is_cut(answer: asyncio.Future[Any]) -> bool:
    """Whether it was gRPC that found nobody, rather than an engine that refused. The channel of a
    session that is lost is closed, which cancels its calls."""
    if answer.cancelled():
        return True
    failure = answer.exception()
    if not isinstance(failure, grpc.RpcError):
        return False
    return failure.code() is grpc.StatusCode.UNAVAILABLE and to_error(failure).reason == _NOBODY


async def _answer(call: Any) -> Any:
    return await call


def _named(error: ServiceError) -> ServiceError:
    """Without the field's name in the engine's contract, which our clients do not know."""
    if error.param == "prompt_token_ids":
        error.param = None
    return error
