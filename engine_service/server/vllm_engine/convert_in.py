"""Requests of vllm.grpc.engine.VllmEngine as the core's plain messages.

What their contract leaves unset means what it means to the servers that gateways know: temperature
1, no filters, no penalties. It reads messages and makes none, so it needs no generated module.
"""

from __future__ import annotations

import json
import struct
import time
import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple

from engine_service.core.messages import Submit
from engine_service.core.params import ConstraintSpec, DecodingChoice, PoolChoice, SamplingParams
from engine_service.server.convert import MAX_ID_CHARS, MAX_N
from tidemill.runtime.errors import InvalidRequest, Unsupported

_UNSERVED = (
    ("kv_transfer_params", "KV transfer between engines"),
    ("kv_transfer_params_json", "KV transfer between engines"),
    ("mm_inputs", "media inputs"),
    ("extra_mm_inputs", "media inputs"),
    ("media_refs", "media inputs"),
)
_KINDS = {
    "json_schema": "json_schema",
    "regex": "regex",
    "grammar": "ebnf",
    "structural_tag": "structural_tag",
    "json_object": "json_object",
    "choice": "choice",
}


class Stops(NamedTuple):
    """Where text ends an output; the engine itself knows tokens only."""

    texts: tuple[str, ...]
    skip_special_tokens: bool
    min_tokens: int


def check(request: Any) -> None:
    """Refuses by name what a GenerateRequest asks for and this engine does not serve."""
    for name, what in _UNSERVED:
        field = request.DESCRIPTOR.fields_by_name[name]
        if request.HasField(name) if field.has_presence else getattr(request, name):
            raise Unsupported(f"{name}: this engine does not serve {what}", param=name)
    if request.data_parallel_rank:
        raise Unsupported(
            f"data_parallel_rank is {request.data_parallel_rank}; every replica is an engine of "
            "its own here, whose only rank is 0",
            param="data_parallel_rank",
        )
    if request.WhichOneof("input") is None:
        raise InvalidRequest("set tokenized or text: the request has no prompt", param="tokenized")


def to_stops(request: Any) -> Stops | None:
    """None: only tokens and lengths end the output."""
    asked = request.sampling_params
    if not asked.stop:
        return None
    if not all(asked.stop):
        raise InvalidRequest(
            "stop has an empty text, which ends every output; leave it out", param="stop"
        )
    return Stops(tuple(asked.stop), asked.skip_special_tokens, asked.min_tokens)


def to_submits(
    request: Any, prompt: Sequence[int], *, max_model_len: int, remaining_s: float | None
) -> list[Submit]:
    """The sequences of one Generate call, without keys; `prompt` are the request's token ids.

    `remaining_s` is what the call's own deadline leaves. Raises InvalidRequest and Unsupported.
    """
    asked = request.sampling_params
    n = asked.n or 1
    if n > MAX_N:
        raise InvalidRequest(f"n is {n}; it must lie in 1..{MAX_N}", param="n")
    packed = _pack(_truncated(prompt, asked, max_model_len))
    sampling, constraint = _sampling(asked), _constraint(asked)
    request_id, now = _named(request.request_id), time.monotonic_ns()
    return [
        Submit(
            key=0,
            request_id=request_id,
            prompt=packed,
            sampling=sampling,
            decoding=DecodingChoice(),
            choice=choice,
            arrival_ns=now,
            deadline_ns=None if remaining_s is None else now + int(remaining_s * 1e9),
            constraint=constraint,
        )
        for choice in range(n)
    ]


def to_embed_submit(request: Any, remaining_s: float | None) -> Submit:
    """The prompt of an EmbedRequest; how it is pooled is the model's own default."""
    now = time.monotonic_ns()
    return Submit(
        key=0,
        request_id=_named(request.request_id),
        prompt=_pack(request.tokenized.input_ids),
        sampling=SamplingParams(),
        decoding=DecodingChoice(),
        arrival_ns=now,
        deadline_ns=None if remaining_s is None else now + int(remaining_s * 1e9),
        pool=PoolChoice(),
    )


def _sampling(asked: Any) -> SamplingParams:
    def given(name: str) -> Any:
        return getattr(asked, name) if asked.HasField(name) else None

    seed = given("seed")
    return SamplingParams(
        temperature=asked.temperature if asked.HasField("temperature") else 1.0,
        top_p=asked.top_p or 1.0,
        top_k=asked.top_k,
        min_p=asked.min_p,
        repetition_penalty=asked.repetition_penalty or 1.0,
        presence_penalty=asked.presence_penalty,
        frequency_penalty=asked.frequency_penalty,
        logit_bias=dict(asked.logit_bias),
        seed=None if seed is None else seed & 0xFFFFFFFF,  # theirs has a sign, ours has none
        max_tokens=given("max_tokens"),
        min_tokens=asked.min_tokens,
        stop_token_ids=tuple(asked.stop_token_ids),
        ignore_eos=asked.ignore_eos,
        logprobs=given("logprobs"),
        prompt_logprobs=given("prompt_logprobs"),
    )


def _constraint(asked: Any) -> ConstraintSpec | None:
    given = asked.WhichOneof("constraint")
    if given is None or (given == "json_object" and not asked.json_object):
        return None
    if given == "choice":
        text = json.dumps(list(asked.choice.choices))
    else:
        text = "" if given == "json_object" else getattr(asked, given)
    return ConstraintSpec(_KINDS[given], text)


def _truncated(prompt: Sequence[int], asked: Any, max_model_len: int) -> Sequence[int]:
    """The last tokens of the prompt; -1 keeps what leaves room for one token of output."""
    if not asked.HasField("truncate_prompt_tokens"):
        return prompt
    most = asked.truncate_prompt_tokens
    if most == -1:
        most = max_model_len - 1
    if most < 1:
        raise InvalidRequest(
            f"truncate_prompt_tokens is {most}; it must be at least 1, or -1 for what the model "
            "can take",
            param="truncate_prompt_tokens",
        )
    return prompt[-most:]


def _pack(token_ids: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


def _named(request_id: str) -> str:
    if len(request_id) > MAX_ID_CHARS:
        raise InvalidRequest(
            f"request_id has {len(request_id)} characters; it may have {MAX_ID_CHARS}",
            param="request_id",
        )
    return request_id or uuid.uuid4().hex
