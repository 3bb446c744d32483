"""Messages of the engine's contract as the frontend's plain values, and back.

It does not know streams or sessions.
"""

from __future__ import annotations

import hashlib
import os
import socket
import sys
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from frontend.messages import (
    Canvas,
    EngineFacts,
    Finish,
    FinishReason,
    Load,
    Sequence,
    Timings,
    TokenLogprobs,
    Usage,
)
from frontend.request import Sampling
from tidemill import __version__
from tidemill.runtime.errors import FailedPrecondition, ServiceError, from_grpc_code
from tidemill.v1 import engine_pb2 as pb

_POOL_TASKS = {
    pb.POOL_TASK_EMBED: "embed",
    pb.POOL_TASK_CLASSIFY: "classify",
    pb.POOL_TASK_SCORE: "score",
}
_ROLES = {pb.ENGINE_ROLE_PREFILL: "prefill", pb.ENGINE_ROLE_DECODE: "decode"}
_MAX_TOKENIZER_BYTES = 256 << 20
_PROTOCOL = (1, 0)


def hello_frame() -> pb.SessionRequest:
    """The first frame of a session: who is calling."""
    hello = pb.Hello(protocol_major=_PROTOCOL[0], protocol_minor=_PROTOCOL[1])
    hello.client_version = __version__
    hello.client_name = f"frontend {socket.gethostname()} {os.getpid()}"
    return pb.SessionRequest(hello=hello)


def known_submits(report: pb.LoadReport) -> int:
    """How many sequences of its session the report's load has."""
    return report.submits if report.HasField("submits") else sys.maxsize


def to_load(report: pb.LoadReport) -> Load:
    """How full the engine is, and how it is."""
    load = report.load
    return Load(
        running=load.running,
        waiting=load.waiting,
        pages_used=load.pages_used,
        pages_total=load.pages_total,
        waiting_tokens=load.waiting_tokens,
        state=pb.EngineState.Name(report.state).removeprefix("ENGINE_STATE_").lower()
        if report.state
        else "",
        stalled=report.stalled,
        paused=report.paused,
        memory_used=report.memory_used_bytes,
        memory_total=report.memory_total_bytes,
    )


def to_sampling(given: Sampling) -> pb.SamplingParams:
    """Knobs that most sequences of a request share."""
    return pb.SamplingParams(
        temperature=given.temperature,
        top_p=given.top_p,
        top_k=given.top_k,
        min_p=given.min_p,
        repetition_penalty=given.repetition_penalty,
        presence_penalty=given.presence_penalty,
        frequency_penalty=given.frequency_penalty,
        logit_bias=given.logit_bias,
        seed=given.seed,
        max_tokens=given.max_tokens,
        min_tokens=given.min_tokens,
        allowed_token_ids=given.allowed_token_ids,
        bad_words=[pb.TokenSequence(token_ids=one) for one in given.bad_words],
    )


def to_spec(sequence: Sequence, sampling: pb.SamplingParams) -> pb.GenerateSpec:
    """The sequence without what belongs to its whole request (ids, timeout, trace)."""
    spec = pb.GenerateSpec(
        prompt_token_ids=sequence.prompt,
        sampling=sampling,
        stop=pb.StopSpec(token_ids=sequence.stop_token_ids, ignore_eos=sequence.ignore_eos),
        logprobs=pb.LogprobsSpec(top=sequence.logprobs, prompt_top=sequence.prompt_logprobs),
        cache_salt=sequence.cache_salt,
        priority=sequence.priority,
        fairness_key=sequence.fairness_key,
        choice=sequence.choice,
        emit_canvas=sequence.emit_canvas,
        pinned=[pb.PinnedToken(position=p, token_id=token) for p, token in sequence.pinned],
    )
    if sequence.constraint is not None:
        spec.constraint.MergeFrom(pb.Constraint(**sequence.constraint.message))
        if sequence.constraint.reasoning is not None:
            said = sequence.constraint.reasoning._asdict()
            spec.reasoning.MergeFrom(pb.Reasoning(**{k: v for k, v in said.items() if v}))
    if sequence.kv_source:
        spec.kv_source.address = sequence.kv_source
    if sequence.decoding.method or sequence.decoding.params:
        spec.decoding.method = sequence.decoding.method or ""
        spec.decoding.params.update(sequence.decoding.params)
    return spec


def to_facts(answer: pb.GetEngineInfoResponse) -> EngineFacts:
    """What the frontend needs of GetEngineInfo's answer."""
    decoding = answer.decoding
    return EngineFacts(
        instance_id=answer.instance_id,
        model_id=answer.model_id,
        max_model_len=answer.limits.max_model_len,
        vocab_size=answer.limits.vocab_size,
        max_logprobs=answer.limits.max_logprobs,
        tokenizer_sha256=answer.tokenizer_sha256,
        device=answer.device,
        max_queued_requests=answer.limits.max_queued_requests,
        default_method=decoding.default_method,
        methods=tuple(decoding.methods),
        approximate_caches=tuple(decoding.approximate_caches),
        block_length=decoding.block_length,
        mask_token_id=decoding.mask_token_id if decoding.HasField("mask_token_id") else None,
        eos_token_ids=tuple(answer.eos_token_ids),
        pool_tasks=tuple(_POOL_TASKS[task] for task in answer.pooling.tasks if task in _POOL_TASKS),
        embedding_size=answer.pooling.dimensions,
        page_size=answer.cache.page_size,
        max_rows=answer.limits.max_rows,
        role=_ROLES.get(answer.role, "both"),
        weight_version=answer.weight_version,
        dtype=answer.dtype,
    )


def to_logprobs(positions: Iterable[pb.TokenLogprobs]) -> list[TokenLogprobs]:
    """One entry per position; empty where the engine had none."""
    return [TokenLogprobs(tuple(p.token_ids), tuple(p.logprobs), p.rank) for p in positions]


def to_canvas(row: pb.CanvasRow) -> Canvas:
    """A canvas row without its row number."""
    fixed = tuple(flag != 0 for flag in row.fixed)
    ids, sure = tuple(unpack_ids(row.token_ids)), tuple(row.confidence)
    return Canvas(row.block, ids, fixed, row.denoise_step, sure)


def to_finish(finish: pb.Finish) -> Finish:
    """A finish; an unknown reason raises ValueError."""
    usage, timings = finish.usage, finish.timings
    return Finish(
        reason=FinishReason.DEAD_END if finish.dead_end else FinishReason(finish.reason),
        stop_token_id=finish.stop_token_id if finish.HasField("stop_token_id") else None,
        detail=finish.detail,
        usage=Usage(
            usage.prompt_tokens,
            usage.cached_tokens,
            usage.output_tokens,
            usage.forward_passes,
            usage.denoise_steps,
            usage.preemptions,
        ),
        timings=Timings(
            timings.arrival_unix_ns, timings.queue_ns, timings.prefill_ns, timings.decode_ns
        ),
    )


def to_error(failed: pb.Failed) -> ServiceError:
    """The error that a Failed frame stands for."""
    return from_grpc_code(failed.code)(
        failed.message,
        reason=failed.reason or None,
        param=failed.param or None,
        retry_after_ms=failed.retry_after_ms or None,
        facts=dict(failed.metadata),
    )


def unpack_ids(packed: bytes) -> list[int]:
    """Token ids from little-endian uint32."""
    ids = array("I", packed)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tolist()


def pack_ids(token_ids: list[int]) -> bytes:
    """Token ids as little-endian uint32."""
    ids = array("I", token_ids)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


async def unpack_tokenizer(stream: Any, folder: Path) -> None:
    """Writes the files of a GetTokenizer stream into `folder`.

    Raises FailedPrecondition when the digest does not fit or a name is not a plain file name.
    """
    manifest: pb.TokenizerManifest | None = None
    contents: list[bytearray] = []
    async for answer in stream:
        if answer.WhichOneof("part") == "manifest":
            manifest = answer.manifest
            contents = [bytearray() for _ in manifest.files]
            continue
        contents[answer.chunk.file] += answer.chunk.content
        if sum(map(len, contents)) > _MAX_TOKENIZER_BYTES:
            raise _refused(f"it is larger than {_MAX_TOKENIZER_BYTES} bytes")
    if manifest is None:
        raise _refused("it sent no manifest")
    digest = hashlib.sha256()
    for file, content in zip(manifest.files, contents, strict=True):
        if Path(file.name).name != file.name or len(content) != file.size:
            raise _refused(f"the file {file.name!r} is unusable or incomplete")
        digest.update(content)
    if digest.hexdigest() != manifest.sha256:
        raise _refused(f"the digest is {digest.hexdigest()}, the manifest says {manifest.sha256}")
    for file, content in zip(manifest.files, contents, strict=True):
        (folder / file.name).write_bytes(content)


def _refused(why: str) -> FailedPrecondition:
    return FailedPrecondition(
        f"cannot use the engine's tokenizer: {why}; name a folder with --tokenizer",
        reason="TOKENIZER_BROKEN",
    )
