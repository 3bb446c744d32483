"""A small engine for frontend tests: real grpc.aio, tokens that can be computed by hand.

It echoes the prompt's ids, again and again, `tokens_per_step` at a time; an end-of-sequence id in
the echo ends the sequence, and pinned tokens stand where they were pinned. Everything it was asked
is kept for the test to look at.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import struct
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from tidemill.runtime.errors import InvalidRequest, ServiceError, Unavailable, Unsupported
from tidemill.runtime.rpc import abort, server_options
from tidemill.v1 import engine_pb2 as pb
from tidemill.v1 import engine_pb2_grpc as rpc

REASON = pb.FinishReason


def pack(ids: list[int]) -> bytes:
    return struct.pack(f"<{len(ids)}I", *ids)


def unpack(packed: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(packed) // 4}I", packed))


POOLED = 8
"""Features of an embedding."""


def pooled(ids: list[int], request: pb.PoolRequest) -> list[float]:
    """The embedding of a prompt."""
    counts = [float(sum(one % POOLED == residue for one in ids)) for residue in range(POOLED)]
    kept = counts[: request.dimensions or POOLED]
    if request.HasField("normalize") and not request.normalize:
        return kept
    return [one / math.hypot(*kept) for one in kept]


@dataclass(eq=False)
class Row:
    """One sequence in the fake engine."""

    spec: pb.GenerateSpec
    prompt: list[int]
    arrived: float
    num_out: int = 0
    stopped_at: int | None = None
    aborted: bool = False


class Writer:
    """The frames of one session, one after the other: gRPC takes no second write beside a first."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self._turn = asyncio.Lock()
        self.submits = 0
        """Read of this session. A load report names them: what crosses it does not count."""
        self.is_mute = False
        """What is written is lost on its way."""

    async def write(self, frame: pb.SessionResponse) -> None:
        async with self._turn:
            if not self.is_mute:
                await self._context.write(frame)


@dataclass(eq=False)
class FakeEngine(rpc.EngineServiceServicer, rpc.EngineInfoServiceServicer):
    """Set the fields before or while it runs."""

    tokenizer_dir: Path
    vocab_size: int
    eos: tuple[int, ...] = ()
    max_model_len: int = 512
    tokens_per_step: int = 1
    step_s: float = 0.0005
    model_id: str = "fake"
    mask_token_id: int | None = None
    refuse: ServiceError | None = None
    """Answer of every Submit."""
    hold: bool = False
    """Sequences wait before their next token."""
    hold_after: int | None = None
    """Sequences wait behind so many tokens."""
    instance_id: str = "fake-1"
    submits: list[pb.GenerateSpec] = field(default_factory=list)
    outcomes: list[str] = field(default_factory=list)
    """How each sequence ended: stop, length, aborted, deadline, matched."""
    live: int = 0
    hellos: list[pb.Hello] = field(default_factory=list)
    sessions: list[Writer] = field(default_factory=list)
    sent: int = 0
    """Tokens of all sequences."""
    pool_tasks: tuple[int, ...] = (pb.POOL_TASK_EMBED,)
    pools: list[pb.PoolRequest] = field(default_factory=list)
    waiting: int = 1
    paused: bool = False
    """Of every load report."""
    limits: pb.EngineLimits = field(default_factory=pb.EngineLimits)
    """Told beside those of the model."""
    hold_tokenizer: bool = False
    """Whoever asks for the tokenizer waits."""
    num_fetching: int = 0
    generation: int = 0
    """Sessions of an older generation end."""

    def drop_sessions(self) -> None:
        """Every session ends with UNAVAILABLE; new ones are accepted."""
        self.generation += 1

    async def say(self, frame: pb.SessionResponse) -> None:
        """Sends a frame on the newest session."""
        await self.sessions[-1].write(frame)

    async def GetEngineInfo(self, request: Any, context: Any) -> Any:
        answer = pb.GetEngineInfoResponse(
            instance_id=self.instance_id,
            model_id=self.model_id,
            tokenizer_sha256=self._tokenizer()[1],
            eos_token_ids=self.eos,
            limits=pb.EngineLimits(
                max_model_len=self.max_model_len, vocab_size=self.vocab_size, max_logprobs=5
            ),
        )
        answer.limits.MergeFrom(self.limits)
        answer.decoding.default_method = "autoregressive"
        answer.decoding.methods.append("autoregressive")
        answer.pooling.tasks.extend(self.pool_tasks)
        answer.pooling.dimensions = POOLED
        if self.mask_token_id is not None:
            answer.decoding.block_length = 4
            answer.decoding.mask_token_id = self.mask_token_id
        return answer

    async def Pool(self, request: Any, context: Any) -> Any:
        """How often each residue occurs among the ids; a score is the share of common ids."""
        self.pools.append(request)
        self.live += 1
        try:
            while self.hold:  # noqa: ASYNC110 - tests set the flag
                await asyncio.sleep(self.step_s)
        finally:
            self.live -= 1
        if self.refuse is not None:
            await abort(context, self.refuse)
        ids = unpack(request.prompt_token_ids)
        usage = pb.Usage(prompt_tokens=len(ids), forward_passes=1)
        if request.task == pb.POOL_TASK_SCORE:
            left, right = set(ids[: request.pair_start]), set(ids[request.pair_start :])
            return pb.PoolResponse(values=[len(left & right) / len(left | right)], usage=usage)
        return pb.PoolResponse(values=pooled(ids, request), usage=usage)

    async def GetTokenizer(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.num_fetching += 1
        try:
            while self.hold_tokenizer:  # noqa: ASYNC110 - tests set the flag
                await asyncio.sleep(self.step_s)
        finally:
            self.num_fetching -= 1
        files, digest = self._tokenizer()
        listed = [pb.TokenizerFile(name=n, size=len(c)) for n, c in files.items()]
        yield pb.GetTokenizerResponse(manifest=pb.TokenizerManifest(sha256=digest, files=listed))
        for number, content in enumerate(files.values()):
            for at in range(0, len(content), 1000):
                chunk = pb.TokenizerChunk(file=number, content=content[at : at + 1000])
                yield pb.GetTokenizerResponse(chunk=chunk)

    async def Session(self, requests: Any, context: Any) -> None:
        generation, writer = self.generation, Writer(context)
        self.sessions.append(writer)
        first = await anext(requests)
        self.hellos.append(first.hello)
        if first.hello.protocol_major != 1:
            await abort(context, InvalidRequest("wrong protocol"))
        ack = pb.HelloAck(protocol_major=1, instance_id=self.instance_id, model_id=self.model_id)
        await writer.write(pb.SessionResponse(hello_ack=ack))
        rows: dict[int, Row] = {}
        reader = asyncio.create_task(self._read(requests, rows, writer))
        try:
            reported = 0.0
            while not reader.done() and generation == self.generation:
                if time.monotonic() - reported > 0.5:
                    reported = time.monotonic()
                    load = pb.Load(
                        running=len(rows), waiting=self.waiting, pages_used=1, pages_total=4
                    )
                    report = pb.LoadReport(load=load, submits=writer.submits, paused=self.paused)
                    await writer.write(pb.SessionResponse(load_report=report))
                step = self._step(rows)
                if step is not None:
                    await writer.write(pb.SessionResponse(step=step))
                await asyncio.sleep(self.step_s)
            if generation != self.generation:
                await abort(context, Unavailable("the session was dropped"))
            await reader
        finally:
            reader.cancel()
            for row in rows.values():
                self._end(row, "lost")

    async def _read(self, requests: Any, rows: dict[int, Row], writer: Writer) -> None:
        async for frame in requests:
            kind = frame.WhichOneof("frame")
            if kind == "submit":
                await self._submit(frame.submit, rows, writer)
            elif kind == "abort":
                for handle in frame.abort.handles:
                    if handle in rows:
                        rows[handle].aborted = True
            elif kind == "stop_matched" and frame.stop_matched.handle in rows:
                rows[frame.stop_matched.handle].stopped_at = frame.stop_matched.completion_tokens

    async def _submit(self, submit: Any, rows: dict[int, Row], writer: Writer) -> None:
        writer.submits += 1
        spec = submit.spec
        self.submits.append(spec)
        error = self.refuse
        given = spec.sampling
        if error is None and not given.temperature >= 0:
            error = InvalidRequest(f"temperature is {given.temperature}", param="temperature")
        if error is None and given.HasField("top_p") and not 0 < given.top_p <= 1:
            error = InvalidRequest(f"top_p is {given.top_p}", param="top_p")
        if error is None and spec.pinned and spec.decoding.method == "autoregressive":
            error = Unsupported("'autoregressive' does not support pinned", param="pinned")
        if error is None and "bogus" in spec.decoding.params:
            error = InvalidRequest("unknown knob 'bogus'", param="decoding.params.bogus")
        if error is not None:
            failed = pb.Failed(
                handle=submit.handle,
                code=error.grpc_code,
                message=error.message,
                reason=error.reason,
                param=error.param or "",
                retriable=error.retriable,
                retry_after_ms=error.retry_after_ms or 0,
            )
            await writer.write(pb.SessionResponse(failed=failed))
            return
        self.live += 1
        rows[submit.handle] = Row(spec, unpack(spec.prompt_token_ids), time.monotonic())

    def _step(self, rows: dict[int, Row]) -> pb.Step | None:
        step = pb.Step(step_seq=1)
        for handle, row in list(rows.items()):
            ids, reason, stop_id = self._advance(row)
            if not ids and reason is None:
                continue
            index = len(step.handles)
            step.handles.append(handle)
            step.counts.append(len(ids))
            step.token_ids += pack(ids)
            self._score(step, index, row, ids)
            if self.mask_token_id is not None and row.spec.emit_canvas and reason is None:
                tail = [ids[0] if ids else 0, self.mask_token_id]
                step.canvas.add(
                    row=index,
                    block_start=8,
                    block=2,
                    token_ids=pack(tail),
                    fixed=b"\1\0",
                    denoise_step=3,
                    confidence=(0.75, 0.5),
                )
            if reason is not None:
                usage = pb.Usage(
                    prompt_tokens=len(row.prompt),
                    cached_tokens=2,
                    output_tokens=row.num_out,
                    forward_passes=row.num_out,
                )
                timings = pb.Timings(arrival_unix_ns=1, queue_ns=2, prefill_ns=3, decode_ns=4)
                finish = pb.Finish(
                    reason=reason, stop_token_id=stop_id, usage=usage, timings=timings
                )
                step.finished.add(row=index, finish=finish)
                self._end(rows.pop(handle), REASON.Name(reason).removeprefix("FINISH_REASON_"))
        return step if step.handles else None

    def _advance(self, row: Row) -> tuple[list[int], Any, int | None]:
        spec = row.spec
        over = spec.HasField("timeout_ms") and (
            time.monotonic() - row.arrived > spec.timeout_ms / 1000
        )
        if row.aborted:
            return [], REASON.FINISH_REASON_ABORTED, None
        if over:
            return [], REASON.FINISH_REASON_DEADLINE, None
        if row.stopped_at is not None:
            return [], REASON.FINISH_REASON_STOP_STRING, None
        if self.hold:
            return [], None, None
        room = self.max_model_len - len(row.prompt)
        limit = min(spec.sampling.max_tokens or room, room)
        stops = {*spec.stop.token_ids, *(() if spec.stop.ignore_eos else self.eos)}
        ids = []
        pinned = {one.position: one.token_id for one in spec.pinned}
        for _ in range(self.tokens_per_step):
            if self.hold_after is not None and row.num_out >= self.hold_after:
                break
            token = row.prompt[row.num_out % len(row.prompt)]
            token = pinned.get(len(row.prompt) + row.num_out, token)
            ids.append(token)
            row.num_out += 1
            self.sent += 1
            if token in stops:
                return ids, REASON.FINISH_REASON_STOP_TOKEN, token
            if row.num_out >= limit:
                return ids, REASON.FINISH_REASON_LENGTH, None
        return ids, None, None

    def _score(self, step: pb.Step, index: int, row: Row, ids: list[int]) -> None:
        """Token i has log-probability -i / 100; the alternatives are the next lower ids."""
        if row.spec.logprobs.HasField("top"):
            scored = step.logprobs.add(row=index)
            for token in ids:
                scored.positions.append(_entry(token, row.spec.logprobs.top))
        if row.spec.logprobs.HasField("prompt_top") and row.num_out <= self.tokens_per_step:
            prompt = step.prompt_logprobs.add(row=index, start=1)
            for token in row.prompt[1:]:
                prompt.positions.append(_entry(token, row.spec.logprobs.prompt_top))

    def _end(self, row: Row, outcome: str) -> None:
        self.live -= 1
        self.outcomes.append(outcome.lower())

    def _tokenizer(self) -> tuple[dict[str, bytes], str]:
        files = {p.name: p.read_bytes() for p in sorted(self.tokenizer_dir.iterdir())}
        return files, hashlib.sha256(b"".join(files.values())).hexdigest()


def _entry(token: int, top: int) -> pb.TokenLogprobs:
    ids = [token, *(max(0, token - i) for i in range(top))]
    return pb.TokenLogprobs(token_ids=ids, logprobs=[-i / 100 for i in ids], rank=1)


@asynccontextmanager
async def serving(engine: FakeEngine, port: int = 0) -> AsyncIterator[int]:
    """The engine on a free port, or on `port`."""
    server = grpc.aio.server(options=server_options(64 << 20))
    rpc.add_EngineServiceServicer_to_server(engine, server)
    rpc.add_EngineInfoServiceServicer_to_server(engine, server)
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    assert bound, f"port {port} is taken"
    await server.start()
    try:
        yield bound
    finally:
        await server.stop(0)
