"""Requests of the contract (protobuf) as the core's plain messages.

It checks what a message can get wrong by itself; what needs the model is core admission's.
"""

from __future__ import annotations

import json
import time
import uuid
from typing import Any

from google.protobuf.message import Message
from google.protobuf.struct_pb2 import Struct, Value

from engine_service.core import messages as core
from engine_service.core.params import ConstraintSpec, DecodingChoice, ReasoningSpec, SamplingParams
from engine_service.server.convert_transfer import to_kv_source
from tidemill.runtime.errors import FailedPrecondition, InvalidRequest, Unsupported
from tidemill.v1 import engine_pb2 as pb

PROTOCOL = (1, 0)
MAX_N = 128
MAX_ID_CHARS, MAX_SALT_CHARS = 256, 1024
SCALARS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "max_tokens",
    "min_tokens",
)
_UNSERVED = (
    ("adapter", "adapters"),
    ("kv_transfer", "other connectors than that of kv_source"),
    ("media", "media inputs"),
)


def check_hello(hello: pb.Hello) -> None:
    """Raises FailedPrecondition unless both sides speak the same major version."""
    if hello.protocol_major != PROTOCOL[0]:
        raise FailedPrecondition(
            f"this engine speaks protocol {PROTOCOL[0]}.{PROTOCOL[1]}, the client "
            f"{hello.client_name!r} {hello.client_version!r} speaks {hello.protocol_major}."
            f"{hello.protocol_minor}; use builds of the same major version",
            reason="PROTOCOL_MISMATCH",
        )


def to_submit(
    spec: pb.GenerateSpec, *, choice: int | None = None, remaining_s: float | None = None
) -> core.Submit:
    """A Submit without a key. `choice` overrides the spec's; `remaining_s` is the RPC's own limit.

    Raises InvalidRequest for malformed values and Unsupported for fields that are not served.
    """
    _refuse_unserved(spec)
    _check_names(spec)
    size = len(spec.prompt_token_ids)
    if size % 4:
        raise InvalidRequest(
            f"prompt_token_ids has {size} bytes, which is not a multiple of 4; "
            "pack the ids as little-endian uint32",
            param="prompt_token_ids",
        )
    now = time.monotonic_ns()
    limits = [spec.timeout_ms * 1_000_000] if spec.HasField("timeout_ms") else []
    limits += [int(remaining_s * 1e9)] if remaining_s is not None else []
    return core.Submit(
        key=0,
        request_id=spec.request_id or uuid.uuid4().hex,
        prompt=spec.prompt_token_ids,
        sampling=_sampling(spec),
        decoding=DecodingChoice(
            method=spec.decoding.method or None, params=_plain(spec.decoding.params)
        ),
        choice=spec.choice if choice is None else choice,
        cache_salt=spec.cache_salt,
        priority=spec.priority,
        fairness_key=spec.fairness_key,
        arrival_ns=now,
        deadline_ns=now + min(limits) if limits else None,
        emit_canvas=spec.emit_canvas,
        pinned=tuple((one.position, one.token_id) for one in spec.pinned),
        constraint=_constraint(spec),
        kv_source=to_kv_source(spec),
    )


def to_choices(request: pb.GenerateRequest, remaining_s: float | None) -> list[core.Submit]:
    """The sequences of one Generate call, choice 0 first; they share arrival and request id."""
    n = request.n if request.HasField("n") else 1
    if not 1 <= n <= MAX_N:
        raise InvalidRequest(f"n is {n}; it must lie in 1..{MAX_N}", param="n")
    if n > 1 and request.spec.choice:
        raise InvalidRequest("set either n or spec.choice, not both", param="choice")
    first = to_submit(request.spec, remaining_s=remaining_s)
    if n == 1:
        return [first]
    spec = pb.GenerateSpec()
    spec.CopyFrom(request.spec)
    spec.request_id = first.request_id
    return [first, *(to_submit(spec, choice=i, remaining_s=remaining_s) for i in range(1, n))]


def _refuse_unserved(spec: pb.GenerateSpec) -> None:
    for name, what in _UNSERVED:
        if _is_set(spec, name):
            raise Unsupported(f"{name}: this engine does not serve {what} yet", param=name)
    if spec.dp_rank:
        raise Unsupported(
            f"dp_rank is {spec.dp_rank}; this engine has no data-parallel ranks yet",
            param="dp_rank",
        )


def _check_names(spec: pb.GenerateSpec) -> None:
    limits = (
        ("request_id", MAX_ID_CHARS),
        ("cache_salt", MAX_SALT_CHARS),
        ("fairness_key", MAX_ID_CHARS),
    )
    for name, most in limits:
        if len(getattr(spec, name)) > most:
            raise InvalidRequest(
                f"{name} has {len(getattr(spec, name))} characters; it may have {most}", param=name
            )


def _is_set(message: Message, name: str) -> bool:
    field = message.DESCRIPTOR.fields_by_name[name]
    if field.has_presence:
        return message.HasField(name)
    return bool(getattr(message, name))


def _sampling(spec: pb.GenerateSpec) -> SamplingParams:
    given = spec.sampling
    stop, logprobs = spec.stop, spec.logprobs
    scalars = {name: getattr(given, name) for name in SCALARS if given.HasField(name)}
    return SamplingParams(
        **scalars,
        logit_bias=dict(given.logit_bias),
        stop_token_ids=tuple(stop.token_ids),
        stop_token_sequences=tuple(tuple(one.token_ids) for one in stop.token_sequences),
        ignore_eos=stop.ignore_eos if stop.HasField("ignore_eos") else None,
        allowed_token_ids=tuple(given.allowed_token_ids),
        bad_words=tuple(tuple(one.token_ids) for one in given.bad_words),
        logprobs=logprobs.top if logprobs.HasField("top") else None,
        prompt_logprobs=logprobs.prompt_top if logprobs.HasField("prompt_top") else None,
    )


def _constraint(spec: pb.GenerateSpec) -> ConstraintSpec | None:
    reasoning = None
    if spec.HasField("reasoning"):
        given = spec.reasoning
        reasoning = ReasoningSpec(given.start, given.end, given.lark)
        is_whole = "@answer" in given.lark if given.lark else bool(given.end)
        if not is_whole or (given.lark and given.start) or not spec.HasField("constraint"):
            raise InvalidRequest(
                "reasoning needs an end, or lark that names @answer and no start, and a constraint "
                "that holds behind it; set both, or leave it out",
                param="reasoning",
            )
    if not spec.HasField("constraint"):
        return None
    asked = spec.constraint
    kind = asked.WhichOneof("grammar")
    if kind is None or (kind == "json_object" and not asked.json_object):
        raise InvalidRequest(
            "constraint names no grammar; set one of its fields, or leave it out",
            param="constraint",
        )
    text = json.dumps(list(asked.choice.values)) if kind == "choice" else getattr(asked, kind)
    return ConstraintSpec(kind, "" if kind == "json_object" else text, reasoning)


def _plain(struct: Struct) -> dict[str, Any]:
    return {name: _plain_value(value) for name, value in struct.fields.items()}


def _plain_value(value: Value) -> Any:
    """JSON has one kind of number: whole ones become int, as a JSON parser would read them."""
    match value.WhichOneof("kind"):
        case "number_value":
            number = value.number_value
            return int(number) if number.is_integer() else number
        case "string_value":
            return value.string_value
        case "bool_value":
            return value.bool_value
        case "struct_value":
            return _plain(value.struct_value)
        case "list_value":
            return [_plain_value(one) for one in value.list_value.values]
    return None
