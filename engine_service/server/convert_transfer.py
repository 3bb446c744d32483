"""KV transfers as messages of the contract (protobuf), and back. It does not know streams."""

from __future__ import annotations

import time

from engine_service.core.handoff import (
    Begun,
    InlinePiece,
    KvLayout,
    KvSource,
    Piece,
    SharedPiece,
)
from engine_service.core.messages import Submit
from engine_service.core.params import DecodingChoice, SamplingParams
from tidemill.runtime.errors import FailedPrecondition, Unsupported
from tidemill.v1 import engine_pb2 as pb


def to_kv_source(spec: pb.GenerateSpec) -> KvSource | None:
    """Where the request says that its KV is."""
    if not spec.HasField("kv_source"):
        return None
    return KvSource(spec.kv_source.address, spec.traceparent, spec.tracestate)


ROLES = {
    "both": pb.ENGINE_ROLE_BOTH,
    "prefill": pb.ENGINE_ROLE_PREFILL,
    "decode": pb.ENGINE_ROLE_DECODE,
}


def opening(
    submit: Submit, begun: Begun, layout: KvLayout, host: str, trace: tuple[str, str]
) -> pb.TransferRequest:
    """The first frame: the KV of the whole units of a sequence's prompt, in the memory of `host` if
    that is the callee's too; `trace` is (traceparent, tracestate)."""
    opened = pb.TransferOpen(
        request_id=submit.request_id,
        prompt_token_ids=submit.prompt[: 4 * begun.num_tokens],
        skip_tokens=begun.num_found,
        method=submit.decoding.method or "",
        cache_salt=submit.cache_salt,
        priority=submit.priority,
        fairness_key=submit.fairness_key,
        layout=pb.KvLayout(**layout._asdict()),
        shared_host=host,
        traceparent=trace[0],
        tracestate=trace[1],
    )
    return pb.TransferRequest(open=opened)


def taken() -> pb.TransferRequest:
    return pb.TransferRequest(taken=pb.PieceTaken())


def check_role(role: str, submit: Submit) -> None:
    """Raises FailedPrecondition and Unsupported for what an engine of this role does not do."""
    if role == "prefill" and submit.pool is None and not submit.only_prefills:
        raise FailedPrecondition(
            "this engine is --role prefill: it computes prompts for decode engines and generates "
            "nothing; send requests to an engine of --role decode or both",
            reason="PREFILL_ONLY",
        )
    if submit.kv_source is not None and role != "decode":
        raise Unsupported(
            f"kv_source is {submit.kv_source.address!r}, and this engine is --role {role}; only "
            "engines of --role decode fetch KV: leave it out",
            param="kv_source",
        )


def check_layout(opened: pb.TransferOpen, own: KvLayout | None, role: str) -> None:
    """Raises FailedPrecondition unless pages mean here what they mean to the caller."""
    if role != "prefill" or own is None:
        raise FailedPrecondition(
            f"this engine is --role {role}; KV is fetched from engines of --role prefill",
            reason="WRONG_ROLE",
        )
    theirs = opened.layout
    for name, value in own._asdict().items():
        if (asked := getattr(theirs, name)) != value:
            raise FailedPrecondition(
                f"{name} is {value!r} here and {asked!r} in the engine that asks: both sides of a "
                "transfer need the same model, number format and page size",
                reason="KV_LAYOUT",
            )


def check_connector(opened: pb.TransferOpen, connector: str, host: str) -> bool:
    """Whether the KV goes by shared memory; raises FailedPrecondition where only that is allowed
    and the caller cannot read it."""
    is_one_host = opened.shared_host != "" and opened.shared_host == host
    if connector == "shm" and not is_one_host:
        raise FailedPrecondition(
            "--kv-connector is shm here, and the engine that asks is of another host or user, or "
            "asks for messages; pass --kv-connector auto to this engine",
            reason="KV_SHARED",
        )
    return is_one_host and connector != "grpc"


def check_way(piece: Piece, connector: str, host: str) -> None:
    """Raises FailedPrecondition for a piece that came another way than was asked for: nobody else
    says which files of other processes are read here."""
    is_shared = isinstance(piece, SharedPiece)
    if is_shared and not host:
        raise FailedPrecondition(
            "shared memory came, and messages were asked for", reason="KV_PIECE"
        )
    if not is_shared and connector == "shm":
        raise FailedPrecondition(
            "a message came, and --kv-connector is shm here; run both engines on one host as "
            "one user with it, or pass --kv-connector auto",
            reason="KV_SHARED",
        )


def to_prefill(opened: pb.TransferOpen, remaining_s: float | None) -> Submit:
    """The sequence that computes the prompt; one token of it may be decided, which nobody sees."""
    now = time.monotonic_ns()
    return Submit(
        key=0,
        request_id=opened.request_id,
        prompt=opened.prompt_token_ids,
        sampling=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
        decoding=DecodingChoice(method=opened.method or None, params={}),
        cache_salt=opened.cache_salt,
        priority=opened.priority,
        fairness_key=opened.fairness_key,
        arrival_ns=now,
        deadline_ns=None if remaining_s is None else now + int(remaining_s * 1e9),
        only_prefills=True,
    )


def piece_message(start: int, num_tokens: int, piece: Piece) -> pb.TransferResponse:
    """Units of `num_tokens` tokens from token `start` on."""
    told = pb.KvPiece(start=start, num_tokens=num_tokens)
    if isinstance(piece, InlinePiece):
        told.inline, told.crc32 = piece.content, piece.crc32
    else:
        pid, fd, size, stamp = piece.pid, piece.fd, piece.size, piece.stamp
        told.shared.MergeFrom(pb.SharedPiece(pid=pid, fd=fd, size=size, stamp=stamp))
    return pb.TransferResponse(piece=told)


def to_piece(told: pb.KvPiece) -> Piece:
    """Its bytes, or where they are."""
    if told.WhichOneof("source") == "shared":
        shared = told.shared
        return SharedPiece(shared.pid, shared.fd, shared.size, shared.stamp)
    return InlinePiece(told.inline, told.crc32)
