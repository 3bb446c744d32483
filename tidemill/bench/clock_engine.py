"""An engine that computes nothing: every step gives each of its sequences the time as a token.

It speaks the session that a frontend speaks, keeps its pace, and runs in a process of its own. The
first token of a sequence is the time at which its Submit was read, all others that of their step.
It does not know text.
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import time
from array import array
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import grpc
import psutil
import uvloop

from tidemill.bench.clock import NUM_TICKS, tick
from tidemill.runtime.rpc import server_options
from tidemill.v1 import engine_pb2 as pb
from tidemill.v1 import engine_pb2_grpc as rpc

_HOST = "127.0.0.1"
_REPORT_EVERY_S = 1.0
_MODEL_LEN = 8192
_MOST_BEHIND_S = 0.02
_START_S = 60.0


class ClockEngine:
    """The engine's process, as its owner sees it."""

    def __init__(self, pipe: Connection, pid: int) -> None:
        self._pipe = pipe
        self.process = psutil.Process(pid)
        self.port = int(pipe.recv())

    def set_step(self, step_s: float) -> None:
        """From now on a step takes so long."""
        self._pipe.send(step_s)


@contextmanager
def clock_engine(first_tick_id: int) -> Iterator[ClockEngine]:
    """Runs the engine until the end of the block; its vocabulary ends with the ticks."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_run, args=(theirs, first_tick_id), daemon=True)
    process.start()
    theirs.close()
    try:
        if process.pid is None or not ours.poll(_START_S):
            raise RuntimeError("the simulated engine does not start")
        yield ClockEngine(ours, process.pid)
    finally:
        process.terminate()
        process.join()


class _Servicer(rpc.EngineServiceServicer, rpc.EngineInfoServiceServicer):
    """What of the contract a frontend needs."""

    def __init__(self, first_tick_id: int) -> None:
        self._first = first_tick_id
        self.step_s = 0.01

    async def GetEngineInfo(self, request: Any, context: Any) -> pb.GetEngineInfoResponse:
        answer = pb.GetEngineInfoResponse(
            instance_id="clock",
            model_id="clock",
            limits=pb.EngineLimits(
                max_model_len=_MODEL_LEN, vocab_size=self._first + NUM_TICKS, max_logprobs=5
            ),
        )
        answer.decoding.default_method = "autoregressive"
        answer.decoding.methods.append("autoregressive")
        return answer

    async def Session(self, requests: AsyncIterator[Any], context: Any) -> None:
        await anext(requests)  # the hello
        ack = pb.HelloAck(protocol_major=1, instance_id="clock", model_id="clock")
        await context.write(pb.SessionResponse(hello_ack=ack))
        rows = _Rows(self._first)
        tasks = [asyncio.create_task(rows.read(requests)), asyncio.create_task(rows.write(context))]
        try:
            await self._keep_time(rows, tasks[0])
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep_time(self, rows: _Rows, reader: asyncio.Task[None]) -> None:
        """Steps are taken when they are due, whatever has been written by then."""
        due = time.monotonic()
        while not reader.done():
            # Timers count whole milliseconds: what one step is late by, the next one is early.
            due = max(due + self.step_s, time.monotonic() - _MOST_BEHIND_S)
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            rows.advance()


class _Rows:
    """The sequences of one session: how many tokens each is still to get, and which wait to be
    written."""

    def __init__(self, first_tick_id: int) -> None:
        self._first = first_tick_id
        self._lengths: dict[int, int] = {}
        self._first_tokens: dict[int, int] = {}
        self._left: dict[int, int] = {}
        self._unsent: dict[int, list[int]] = {}
        self._has_news = asyncio.Event()

    async def read(self, requests: AsyncIterator[Any]) -> None:
        """Takes what the frontend sends, until it ends the session."""
        async for frame in requests:
            if frame.HasField("submit"):
                handle = frame.submit.handle
                self._first_tokens[handle] = self._first + tick()
                length = frame.submit.spec.sampling.max_tokens
                self._left[handle] = self._lengths[handle] = length
            elif frame.HasField("abort"):
                for handle in frame.abort.handles:
                    for known in (self._left, self._lengths, self._first_tokens, self._unsent):
                        known.pop(handle, None)

    async def write(self, context: Any) -> None:
        """Sends what there is as soon as what was sent before is on its way, so that a frontend
        that reads slowly gets the same tokens in fewer messages."""
        while True:
            try:
                async with asyncio.timeout(_REPORT_EVERY_S):
                    await self._has_news.wait()
            except TimeoutError:
                load = pb.LoadReport(load=pb.Load(running=len(self._left), pages_total=1))
                await context.write(pb.SessionResponse(load_report=load))
                continue
            self._has_news.clear()
            await context.write(pb.SessionResponse(step=self._take()))

    def advance(self) -> None:
        """One token for every sequence."""
        now, left, unsent = self._first + tick(), self._left, self._unsent
        for handle in list(left):
            unsent.setdefault(handle, []).append(self._first_tokens.pop(handle, now))
            left[handle] -= 1
            if not left[handle]:
                del left[handle]
        if unsent:
            self._has_news.set()

    def _take(self) -> pb.Step:
        unsent, self._unsent = self._unsent, {}
        handles, tokens = list(unsent), list(unsent.values())
        packed = array("I", itertools.chain.from_iterable(tokens)).tobytes()
        step = pb.Step(handles=handles, counts=map(len, tokens), token_ids=packed)
        for row, handle in enumerate(handles):
            if handle not in self._left:
                usage = pb.Usage(output_tokens=self._lengths.pop(handle))
                finish = pb.Finish(reason=pb.FINISH_REASON_LENGTH, usage=usage)
                step.finished.add(row=row, finish=finish)
        return step


def _run(pipe: Connection, first_tick_id: int) -> None:
    uvloop.run(_serve(pipe, first_tick_id))


async def _serve(pipe: Connection, first_tick_id: int) -> None:
    """Serves until the process is ended; the pipe brings new step times."""
    servicer, server = _Servicer(first_tick_id), grpc.aio.server(options=server_options(64 << 20))
    rpc.add_EngineServiceServicer_to_server(servicer, server)
    rpc.add_EngineInfoServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port(f"{_HOST}:0")
    await server.start()

    def take() -> None:
        servicer.step_s = pipe.recv()

    asyncio.get_running_loop().add_reader(pipe.fileno(), take)
    pipe.send(port)
    await server.wait_for_termination()
