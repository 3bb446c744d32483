"""vllm.grpc.engine.VllmEngine: the RPCs by which public gateways drive an engine.

Contract: the wheel smg-grpc-proto (github.com/smg-project/smg). Each handler is a shell; sequences
run in the same Generation as those of our own contract.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from typing import Any

import grpc

from engine_service.server.convert_pool import to_pool_response
from engine_service.server.desk import Desk
from engine_service.server.generation import Generation
from engine_service.server.pool_call import PoolCall
from engine_service.server.request_trace import POOL_SPAN, SPAN
from engine_service.server.servicer_info import package_version
from engine_service.server.tokenizer_files import TokenizerFiles
from engine_service.server.vllm_engine import bundle
from engine_service.server.vllm_engine.convert_in import (
    check,
    to_embed_submit,
    to_stops,
    to_submits,
)
from engine_service.server.vllm_engine.convert_kv import KvWire
from engine_service.server.vllm_engine.convert_out import Wire
from engine_service.server.vllm_engine.outputs import Outputs
from engine_service.server.vllm_engine.text import StopWatch, TextEdge, encode
from tidemill.runtime.errors import InvalidRequest, NotFound, ServiceError, Unsupported
from tidemill.runtime.rpc import abort, answering

VLLM_ENGINE = "vllm.grpc.engine.VllmEngine"
Refusal = Callable[[Any, Any, Any], Coroutine[Any, Any, None]]


def add_vllm_engine(desk: Desk, server: grpc.aio.Server) -> None:
    """Serves it beside our own services. Raises FailedPrecondition where its contract is not
    installed."""
    wire = Wire()
    wire.add_to_server(VllmEngineServicer(desk, wire), server)


def _unserved(rpc: str, advice: str) -> Refusal:
    async def refuse(self: Any, request: Any, context: Any) -> None:
        await abort(context, Unsupported(f"VllmEngine.{rpc} is not served: {advice}"))

    return refuse


class VllmEngineServicer:
    """Operators' RPCs are refused: they stand in AdminService alone."""

    def __init__(self, desk: Desk, wire: Wire) -> None:
        self._desk = desk
        self._wire = wire
        self._kv = KvWire()
        self._text = TextEdge()

    async def Generate(self, request: Any, context: Any) -> None:
        async with answering(context):
            trace = _trace(context)
            with self._desk.admitting(SPAN, trace):
                facts = self._desk.check_open()
                check(request)
                prompt = await self._prompt(request)
                submits = to_submits(
                    request,
                    prompt,
                    max_model_len=facts.max_model_len,
                    remaining_s=context.time_remaining(),
                )
                watches = await self._watches(request, len(submits))
            generation = Generation(self._desk, context)
            outputs = Outputs(
                self._wire,
                submits,
                streamed=request.stream,
                watches=watches,
                stop=generation.stop,
            )
            await generation.serve(submits, trace, outputs.answers)

    async def Embed(self, request: Any, context: Any) -> Any:
        async with answering(context):
            trace = _trace(context)
            with self._desk.admitting(POOL_SPAN, trace):
                self._desk.check_open()
                if not request.HasField("tokenized"):
                    raise InvalidRequest("set tokenized: there is no prompt", param="tokenized")
                submit = to_embed_submit(request, context.time_remaining())
            finish = await PoolCall(self._desk).finish(submit, trace)
            return self._wire.embedded(finish, to_pool_response(finish).values)

    async def Abort(self, request: Any, context: Any) -> Any:
        """Ids that nobody knows, or that have ended, change nothing."""
        async with answering(context):
            for request_id in request.request_ids:
                self._desk.core.abort_request(request_id)
            return self._wire.aborted()

    async def HealthCheck(self, request: Any, context: Any) -> Any:
        """Healthy while requests should be sent here: not while loading or draining, nor while
        the core is silent."""
        snapshot = self._desk.board.snapshot
        return self._wire.health(healthy=snapshot.is_ready, detail=snapshot.detail)

    async def GetModelInfo(self, request: Any, context: Any) -> Any:
        async with answering(context):
            facts = self._desk.open_facts()
            checkpoint = await asyncio.to_thread(_checkpoint, self._desk.tokenizer)
            return self._wire.model_info(facts, checkpoint)

    async def GetServerInfo(self, request: Any, context: Any) -> Any:
        async with answering(context):
            desk = self._desk
            return self._wire.server_info(
                desk.open_facts(),
                active=desk.core.num_live,
                silence_s=desk.core.silence_ms / 1000,
                up_s=desk.reading().uptime_s,
            )

    async def GetLoads(self, request: Any, context: Any) -> Any:
        async with answering(context):
            if request.dp_rank:
                raise NotFound(
                    f"dp_rank is {request.dp_rank}; this engine has rank 0 only", param="dp_rank"
                )
            facts = self._desk.open_facts()
            return self._wire.loads(facts, self._desk.core.load, package_version())

    async def GetTokenizer(self, request: Any, context: Any) -> None:
        async with answering(context):
            found = self._desk.open_tokenizer()
            archive, sha256 = await asyncio.to_thread(bundle.pack, found)
            for chunk in self._wire.tokenizer_chunks(archive, sha256, bundle.CHUNK_BYTES):
                await context.write(chunk)

    async def SubscribeKvEvents(self, request: Any, context: Any) -> None:
        """Everything that is held, then what changes; for a subscriber that was here before, what
        it missed, or everything anew where that is not known any more."""
        async with answering(context):
            self._desk.open_facts()
            last_seq = request.start_sequence_number
            next_seq = last_seq + 1 if last_seq else await self._show_index(context)
            while not await self._follow(next_seq, context):
                next_seq = await self._show_index(context)

    FlushCache = _unserved("FlushCache", "use tidemill.v1.AdminService")
    StartProfile = _unserved("StartProfile", "use tidemill.v1.AdminService")
    StopProfile = _unserved("StopProfile", "use tidemill.v1.AdminService")

    async def _show_index(self, context: Any) -> int:
        """Tells everything that is held; returns the number of the batch behind it."""
        seq, events = await self._desk.kv_feed.show()
        for chunk in self._kv.snapshot(seq, time.time(), events):
            await context.write(chunk)
        return seq + 1

    async def _follow(self, seq: int, context: Any) -> bool:
        """Tells what changes, to the end of the feed. False: batch `seq` or a later one is lost."""
        async with aclosing(self._desk.kv_feed.follow(seq)) as batches:
            async for batch in batches:
                if batch.is_snapshot:
                    return False
                await context.write(self._kv.batch(batch.seq, batch.unix_s, batch.events))
        return True

    async def _prompt(self, request: Any) -> Any:
        if request.WhichOneof("input") == "tokenized":
            return request.tokenized.input_ids
        tokenizer = await self._text.tokenizer(self._desk.tokenizer, param="text")
        return await encode(tokenizer, request.text)

    async def _watches(self, request: Any, n: int) -> list[StopWatch | None]:
        stops = to_stops(request)
        if stops is None:
            return [None] * n
        tokenizer = await self._text.tokenizer(self._desk.tokenizer, param="stop")
        return [StopWatch(tokenizer, stops) for _ in range(n)]


def _trace(context: Any) -> tuple[str, str]:
    """W3C trace context, which gateways put into the call's metadata."""
    metadata = dict(context.invocation_metadata() or ())
    return str(metadata.get("traceparent", "")), str(metadata.get("tracestate", ""))


def _checkpoint(files: TokenizerFiles | ServiceError | None) -> dict[str, Any]:
    """The model's config.json where it lies beside the tokenizer, whose folder may be another than
    the model's: nobody has read what is in it. Blocking."""
    if not isinstance(files, TokenizerFiles) or "config.json" not in dict(files.files):
        return {}
    try:
        found = json.loads(files.read("config.json"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
