"""The core's plain messages as messages of the contract (protobuf).

It does not know streams: it makes frames, others write them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from google.protobuf.message import Message
from google.protobuf.struct_pb2 import Struct

from engine_service.core import messages as core
from engine_service.core.facts import EngineFacts
from engine_service.core.step import FULL, TokenLogprobs
from engine_service.server.convert import PROTOCOL, SCALARS
from engine_service.server.convert_pool import pooling_message
from engine_service.server.convert_transfer import ROLES
from engine_service.server.outlet import (
    Draining,
    Failure,
    LoadReport,
    Notice,
    Pong,
    StepRows,
    halves,
)
from engine_service.server.state import Snapshot
from tidemill.runtime.errors import ServiceError
from tidemill.runtime.rpc import in_short
from tidemill.telemetry.context import epoch_ns
from tidemill.v1 import engine_pb2 as pb

FEATURES = ("coalescing", "canvas", "load-report")
_STEP_BYTES = 4 << 20
_ROW_BYTES = 256
"""Of a row in a step beside its tokens, at most, where nothing sparse is told of it."""

# ---------------------------------------------------------------- session frames


def hello_ack(facts: EngineFacts, instance_id: str, sha256: str, max_bytes: int) -> Message:
    return pb.SessionResponse(
        hello_ack=pb.HelloAck(
            protocol_major=PROTOCOL[0],
            protocol_minor=PROTOCOL[1],
            features=FEATURES,
            instance_id=instance_id,
            model_id=facts.model_id,
            weight_version=facts.weight_version,
            tokenizer_sha256=sha256,
            limits=limits(facts, max_bytes),
        )
    )


def limits(facts: EngineFacts, max_bytes: int) -> pb.EngineLimits:
    return pb.EngineLimits(
        max_model_len=facts.max_model_len,
        max_rows=facts.max_rows,
        max_queued_requests=facts.max_queued_requests,
        vocab_size=facts.vocab_size,
        max_logprobs=facts.max_logprobs,
        max_message_bytes=max_bytes,
    )


def step_frames(rows: StepRows, max_bytes: int = _STEP_BYTES) -> Iterator[pb.SessionResponse]:
    """One frame, or several where one would be larger than 4 MiB or `max_bytes`. What one row says
    of one token is never cut."""
    frame = pb.SessionResponse(
        step=pb.Step(
            step_seq=rows.seq,
            t_unix_ns=time.time_ns(),
            handles=rows.handles,
            counts=rows.counts,
            token_ids=rows.token_ids,
        )
    )
    step = frame.step
    for row, entries in rows.logprobs:
        step.logprobs.add(row=row, positions=map(_token_logprobs, entries))
    for row, start, scores in rows.prompt_logprobs:
        step.prompt_logprobs.add(row=row, start=start, positions=map(_token_logprobs, scores))
    for row, finish in rows.finished:
        step.finished.add(row=row, finish=_finish(finish))
    for row, shown in rows.canvas:
        step.canvas.append(_canvas(row, shown))
    sparse = rows.logprobs or rows.prompt_logprobs or rows.canvas
    most = min(max_bytes, _STEP_BYTES)
    least = len(rows.token_ids) + _ROW_BYTES * len(rows.handles)
    if (sparse or least > most) and frame.ByteSize() > most and (cut := _halves(rows)):
        for half in cut:
            yield from step_frames(half, max_bytes)
    else:
        yield frame


def notice_frame(notice: Notice) -> pb.SessionResponse:
    match notice:
        case Failure():
            return pb.SessionResponse(failed=_failed(notice.handle, notice.error))
        case Pong():
            return pb.SessionResponse(pong=pb.Pong(nonce=notice.nonce))
        case LoadReport():
            report = pb.LoadReport(
                load=load(notice.load),
                engine_silence_ms=notice.engine_silence_ms,
                stalled=notice.stalled,
                state=int(notice.state),  # type: ignore[arg-type]
                memory_used_bytes=notice.memory_used,
                memory_total_bytes=notice.memory_total,
                submits=notice.submits,
                paused=notice.paused,
            )
            return pb.SessionResponse(load_report=report)
        case Draining():
            return pb.SessionResponse(draining=pb.Draining(deadline_ms=notice.deadline_ms))


def responses(rows: StepRows, max_bytes: int = _STEP_BYTES) -> Iterator[pb.GenerateResponse]:
    """The same rows for a Generate stream, where a handle is the index of a choice: a message for
    each, or several where one would be larger than 4 MiB or `max_bytes`."""
    answers = _responses(rows)
    most = min(max_bytes, _STEP_BYTES)
    if any(answer.ByteSize() > most for answer in answers) and (cut := _halves(rows)):
        for half in cut:
            yield from responses(half, max_bytes)
    else:
        yield from answers


def _halves(rows: StepRows) -> tuple[StepRows, ...]:
    """Nothing where one of them would be the whole again."""
    cut = halves(rows)
    return () if rows in cut else cut


def _responses(rows: StepRows) -> list[pb.GenerateResponse]:
    answers = []
    offset = 0
    for handle, count in zip(rows.handles, rows.counts, strict=True):
        stop = offset + 4 * count
        answers.append(pb.GenerateResponse(index=handle, token_ids=rows.token_ids[offset:stop]))
        offset = stop
    for row, entries in rows.logprobs:
        answers[row].logprobs.extend(map(_token_logprobs, entries))
    for row, start, scores in rows.prompt_logprobs:
        if not answers[row].prompt_logprobs:
            answers[row].prompt_logprobs_start = start
        answers[row].prompt_logprobs.extend(map(_token_logprobs, scores))
    for row, finish in rows.finished:
        answers[row].finish.CopyFrom(_finish(finish))
    for row, shown in rows.canvas:
        answers[row].canvas.CopyFrom(_canvas(0, shown))
    return answers


def load(now: core.Load) -> pb.Load:
    return pb.Load(**now._asdict())


def _token_logprobs(entry: TokenLogprobs | None) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(**entry._asdict()) if entry is not None else pb.TokenLogprobs()


def _canvas(row: int, shown: core.ShownCanvas) -> pb.CanvasRow:
    canvas = shown.canvas
    return pb.CanvasRow(
        row=row,
        block_start=shown.start,
        block=shown.block,
        token_ids=pack(canvas.token_ids),
        fixed=bytes(canvas.fixed),
        denoise_step=canvas.step,
        confidence=canvas.confidence or (),
    )


def pack(token_ids: Sequence[int]) -> bytes:
    return b"".join([token.to_bytes(4, "little") for token in token_ids])


def _finish(finish: core.Finish) -> pb.Finish:
    times = finish.timings
    is_dead_end = finish.reason is core.FinishReason.DEAD_END
    reason = core.FinishReason.ERROR if is_dead_end else finish.reason
    return pb.Finish(
        reason=int(reason),  # type: ignore[arg-type]
        dead_end=is_dead_end,
        stop_token_id=finish.stop_token_id,
        detail=finish.detail,
        usage=_usage(finish.usage),
        timings=pb.Timings(
            arrival_unix_ns=epoch_ns(times.arrival_ns),
            queue_ns=times.queue_ns,
            prefill_ns=times.prefill_ns,
            decode_ns=times.decode_ns,
        ),
    )


def _usage(usage: core.Usage) -> pb.Usage:
    per_forward = usage.output_tokens / max(1, usage.forward_passes)
    return pb.Usage(**usage._asdict(), tokens_per_forward=per_forward)


def _failed(handle: int, error: ServiceError) -> pb.Failed:
    """Cut as a status is: a message too long to be sent would end the session of all others."""
    message, param, facts = in_short(error)
    return pb.Failed(
        handle=handle,
        code=error.grpc_code,
        message=message,
        reason=error.reason,
        param=param,
        retriable=error.retriable,
        retry_after_ms=error.retry_after_ms or 0,
        metadata=facts,
    )


# ---------------------------------------------------------------- information


def state_response(now: Snapshot) -> pb.WatchStateResponse:
    return pb.WatchStateResponse(
        revision=now.revision,
        state=int(now.state),  # type: ignore[arg-type]
        detail=now.detail,
        load=load(now.load),
        paused=now.paused,
    )


def abort_response(outcomes: Mapping[str, bool | None]) -> pb.AbortResponse:
    """True: aborted; False: it had ended before; None: unknown."""
    names = {True: pb.ABORT_OUTCOME_ABORTED, False: pb.ABORT_OUTCOME_ALREADY_DONE}
    found = {key: names.get(one, pb.ABORT_OUTCOME_UNKNOWN) for key, one in outcomes.items()}  # type: ignore[arg-type]
    return pb.AbortResponse(outcomes=found)


def manifest(sha256: str, files: Sequence[tuple[str, int]]) -> pb.GetTokenizerResponse:
    listed = [pb.TokenizerFile(name=name, size=size) for name, size in files]
    return pb.GetTokenizerResponse(manifest=pb.TokenizerManifest(sha256=sha256, files=listed))


def chunk(index: int, content: bytes) -> pb.GetTokenizerResponse:
    return pb.GetTokenizerResponse(chunk=pb.TokenizerChunk(file=index, content=content))


def engine_info(
    facts: EngineFacts, *, instance_id: str, version: str, sha256: str, max_bytes: int
) -> pb.GetEngineInfoResponse:
    """`started_unix_ns` is left to the caller, who knows it."""
    sampling = facts.default_sampling
    defaults = {n: v for n in SCALARS if (v := getattr(sampling, n)) is not None}
    knobs = Struct()
    knobs.update(dict[str, Any](facts.default_params))
    return pb.GetEngineInfoResponse(
        instance_id=instance_id,
        model_id=facts.model_id,
        weight_version=facts.weight_version,
        architecture=facts.architecture,
        engine_version=version,
        tokenizer_sha256=sha256,
        limits=limits(facts, max_bytes),
        decoding=pb.DecodingInfo(
            default_method=facts.default_method,
            methods=facts.methods,
            block_length=facts.block_length % FULL,
            mask_token_id=facts.mask_token_id,
            default_params=knobs,
            approximate_caches=facts.approximate_caches,
        ),
        cache=pb.CacheInfo(
            page_size=facts.page_size,
            num_pages=facts.num_pages,
            prefix_caching=facts.prefix_caching,
        ),
        dtype=facts.dtype,
        device=facts.device,
        tensor_parallel_size=facts.tensor_parallel_size,
        pipeline_parallel_size=facts.pipeline_parallel_size,
        expert_parallel=facts.expert_parallel,
        features=FEATURES,
        default_sampling=pb.SamplingParams(**defaults),
        eos_token_ids=facts.eos_token_ids,
        pooling=None if facts.pooling is None else pooling_message(facts.pooling),
        role=ROLES[facts.role],
    )
