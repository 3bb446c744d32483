"""Pool: requests of the contract (protobuf) as the core's plain messages, and its answers."""

from __future__ import annotations

import time
import uuid
from array import array

from engine_service.core import messages as core
from engine_service.core.params import DecodingChoice, PoolChoice, PoolFacts, SamplingParams
from engine_service.server.convert import MAX_ID_CHARS
from tidemill.runtime.errors import (
    Cancelled,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    ServiceError,
    Unsupported,
)
from tidemill.v1 import engine_pb2 as pb

_TASKS = {
    pb.POOL_TASK_UNSPECIFIED: "embed",
    pb.POOL_TASK_EMBED: "embed",
    pb.POOL_TASK_CLASSIFY: "classify",
    pb.POOL_TASK_SCORE: "score",
}
_KINDS = {
    pb.POOLING_KIND_MEAN: "mean",
    pb.POOLING_KIND_LAST: "last",
    pb.POOLING_KIND_CLS: "cls",
}
_ENDS: dict[core.FinishReason, tuple[type[ServiceError], str]] = {
    core.FinishReason.ABORTED: (Cancelled, "the request was aborted"),
    core.FinishReason.DEADLINE: (DeadlineExceeded, "the request did not finish in time"),
}


def to_pool_submit(request: pb.PoolRequest, remaining_s: float | None) -> core.Submit:
    """A Submit without a key; `remaining_s` is the RPC's own limit.

    Raises InvalidRequest for malformed values and Unsupported for fields that are not served.
    """
    if request.adapter:
        raise Unsupported("adapter: this engine does not serve adapters yet", param="adapter")
    if len(request.request_id) > MAX_ID_CHARS:
        raise InvalidRequest(
            f"request_id has {len(request.request_id)} characters; it may have {MAX_ID_CHARS}",
            param="request_id",
        )
    now = time.monotonic_ns()
    limits = [request.timeout_ms * 1_000_000] if request.HasField("timeout_ms") else []
    limits += [int(remaining_s * 1e9)] if remaining_s is not None else []
    return core.Submit(
        key=0,
        request_id=request.request_id or uuid.uuid4().hex,
        prompt=request.prompt_token_ids,
        sampling=SamplingParams(),
        decoding=DecodingChoice(),
        priority=request.priority,
        arrival_ns=now,
        deadline_ns=now + min(limits) if limits else None,
        pool=_choice(request),
    )


def to_pool_response(finish: core.Finish) -> pb.PoolResponse:
    """Raises the ServiceError that an early end stands for."""
    if finish.reason is not core.FinishReason.STOP:
        kind, text = _ENDS.get(finish.reason, (InternalError, "the request failed"))
        raise kind(f"{text}: {finish.detail}" if finish.detail else text)
    values = array("f", finish.vector)
    return pb.PoolResponse(values=values, usage=pb.Usage(**finish.usage._asdict()))


def pooling_message(facts: PoolFacts) -> pb.PoolingInfo:
    """What GetEngineInfo says of Pool."""
    tasks = [] if facts.refusal else [pb.POOL_TASK_EMBED]
    tasks += [pb.POOL_TASK_CLASSIFY] if facts.num_labels else []
    tasks += [pb.POOL_TASK_SCORE] if facts.num_labels == 1 else []
    kind = next(number for number, name in _KINDS.items() if name == facts.kind)
    return pb.PoolingInfo(
        tasks=tasks,
        default_pooling=kind,
        dimensions=facts.dimensions,
        num_labels=facts.num_labels,
    )


def _choice(request: pb.PoolRequest) -> PoolChoice:
    kind = None
    if request.HasField("pooling"):
        kind = _KINDS.get(request.pooling)
        if kind is None:
            raise InvalidRequest(
                f"pooling is {request.pooling}; it must be MEAN, LAST or CLS", param="pooling"
            )
    task = _TASKS.get(request.task)
    if task is None:
        raise InvalidRequest(
            f"task is {request.task}; it must be EMBED, CLASSIFY or SCORE", param="task"
        )
    return PoolChoice(
        task=task,
        kind=kind,
        normalize=request.normalize if request.HasField("normalize") else None,
        dimensions=request.dimensions if request.HasField("dimensions") else None,
        pair_start=request.pair_start if request.HasField("pair_start") else None,
    )
