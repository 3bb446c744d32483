"""How much of the ideal token rate the stack delivers when the model costs nothing but time.

Real engine server, real pipe, real core loop, real gRPC on loopback; the executor is simulated.
It does not know the command line.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import platform
import struct
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeVar

import grpc
import psutil
import uvloop

from tidemill.bench.bounds import AboveZero, OneOrMore
from tidemill.bench.percentiles import percentiles_ms
from tidemill.bench.simulated import simulated_engine
from tidemill.runtime.errors import InvalidRequest
from tidemill.runtime.rpc import channel_options
from tidemill.v1 import engine_pb2 as pb
from tidemill.v1 import engine_pb2_grpc

_Made = TypeVar("_Made")
_START_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StackOptions:
    """What is measured."""

    requests: OneOrMore = 256
    """Requests that are alive at any time."""
    step_ms: AboveZero = 5.0
    """Step time of the simulated executor."""
    seconds: AboveZero = 8.0
    """Length of each measurement, after a quarter of it as warm-up."""
    prompt_len: OneOrMore = 32
    """Prompt tokens per request."""
    output_len: OneOrMore = 1024
    """Output tokens per request; a new one follows at once."""


class _Meter:
    """Counts tokens and delays inside the measured window; CPU seconds of both processes.

    `core_host_ms_per_step`: CPU time of the core loop's own work (drain, schedule, apply, emit), as
    it reports it. `rank_cpu_ms_per_step`: all of its process, with the simulated executor.
    """

    def __init__(self, server: psutil.Process, read_load: Callable[[], Awaitable[pb.Load]]) -> None:
        self._read_load = read_load
        self._processes = (server, server.children()[0])
        self._open = False
        self.tokens = self.messages = 0
        self.delays_s: list[float] = []

    def count(self, num_tokens: int, sent_unix_ns: int) -> None:
        if self._open:
            self.tokens += num_tokens
            self.messages += 1
            if sent_unix_ns:
                self.delays_s.append((time.time_ns() - sent_unix_ns) / 1e9)

    async def measure(self, options: StackOptions) -> dict[str, Any]:
        """Waits for the warm-up and the window; the figures of the window."""
        await asyncio.sleep(options.seconds / 4)
        load_before = await self._read_load()
        began, cpu, client_cpu = time.perf_counter(), self._cpu(), time.process_time()
        self._open = True
        await asyncio.sleep(options.seconds)
        self._open = False
        wall, client_s = time.perf_counter() - began, time.process_time() - client_cpu
        server_s, rank_s = (now - then for now, then in zip(self._cpu(), cpu, strict=True))
        load = await self._read_load()
        host_ns, core_steps = load.host_ns - load_before.host_ns, load.steps - load_before.steps
        rate, tokens = self.tokens / wall, max(1, self.tokens)
        ideal = options.requests / (options.step_ms / 1000)
        steps = tokens / options.requests
        figures = {
            "tokens_per_s": round(rate, 1),
            "ratio_to_ideal": round(rate / ideal, 4),
            "step_period_ms": round(wall * 1e3 / steps, 3),
            "core_host_ms_per_step": round(host_ns / 1e6 / max(1, core_steps), 3),
            "rank_cpu_ms_per_step": round(rank_s * 1e3 / steps, 3),
            "server_cpu_us_per_token": round(server_s * 1e6 / tokens, 3),
            "client_cpu_us_per_token": round(client_s * 1e6 / tokens, 3),
            "messages_per_s": round(self.messages / wall, 1),
        }
        delays = percentiles_ms(self.delays_s, (50, 99))
        return figures | {f"delivery_ms_{name}": delay for name, delay in delays.items()}

    def _cpu(self) -> tuple[float, ...]:
        return tuple([sum(process.cpu_times()[:2]) for process in self._processes])


def run(options: StackOptions) -> dict[str, Any]:
    """Starts an engine, measures Session and Generate one after the other, and stops it.

    Raises InvalidRequest for requests that the engine refuses, RuntimeError where it does not
    start.
    """
    return uvloop.run(_run(options))


def table(figures: dict[str, Any]) -> list[tuple[str, str]]:
    """The rows that a terminal shows."""
    session, generate = figures["session"], figures["generate"]
    delivery = f"{session.get('delivery_ms_p50')} p50 {session.get('delivery_ms_p99')} p99"
    return [
        ("ideal tok/s", f"{figures['ideal_tokens_per_s']:,.0f}"),
        ("Session tok/s", f"{session['tokens_per_s']:,.0f}"),
        ("Session / ideal", f"{session['ratio_to_ideal']:.3f}"),
        ("Generate / ideal", f"{generate['ratio_to_ideal']:.3f}"),
        ("core host ms per step", f"{session['core_host_ms_per_step']:.2f}"),
        ("rank CPU ms per step", f"{session['rank_cpu_ms_per_step']:.2f}"),
        ("Session delivery ms", delivery),
        ("server CPU us per token", f"{session['server_cpu_us_per_token']} Session"),
        ("", f"{generate['server_cpu_us_per_token']} Generate"),
    ]


async def _run(options: StackOptions) -> dict[str, Any]:
    results: dict[str, Any] = {
        "options": asdict(options),
        "ideal_tokens_per_s": options.requests / (options.step_ms / 1000),
        "machine": {
            "cores": len(os.sched_getaffinity(0)),
            "python": platform.python_version(),
            "grpcio": grpc.__version__,
            "load_average_at_start": os.getloadavg()[0],
        },
    }
    with simulated_engine(options.step_ms, options.requests) as (process, port):
        for name, drive in (("session", _drive_session), ("generate", _drive_generate)):
            async with _stubs(process, port) as (stub, engine_facts):
                meter = _Meter(psutil.Process(process.pid), partial(_load, engine_facts))
                results[name] = await _while(drive(stub, options, meter), meter.measure(options))
    session, generate = results["session"], results["generate"]
    for name in ("ratio_to_ideal", "core_host_ms_per_step", "rank_cpu_ms_per_step"):
        results[name] = session[name]
    cpu = generate["server_cpu_us_per_token"] / max(session["server_cpu_us_per_token"], 1e-9)
    results["generate_to_session_server_cpu"] = round(cpu, 2)
    return results


async def _while(driving: Awaitable[None], measuring: Awaitable[_Made]) -> _Made:
    """What is measured while requests are driven; raises what ends them before."""
    driven, measured = asyncio.ensure_future(driving), asyncio.ensure_future(measuring)
    try:
        await asyncio.wait((driven, measured), return_when=asyncio.FIRST_COMPLETED)
        if driven.done():
            driven.result()
        return await measured
    finally:
        driven.cancel()
        measured.cancel()
        await asyncio.gather(driven, measured, return_exceptions=True)


@asynccontextmanager
async def _stubs(process: subprocess.Popen[bytes], port: int) -> AsyncIterator[tuple[Any, Any]]:
    """EngineService and EngineInfoService of an engine that is up."""
    options = channel_options(64 << 20)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options) as channel:
        facts = engine_pb2_grpc.EngineInfoServiceStub(channel)
        give_up = time.monotonic() + _START_S
        while True:
            try:
                await facts.GetEngineInfo(pb.GetEngineInfoRequest(), timeout=5)
                break
            except grpc.aio.AioRpcError as error:
                if process.poll() is not None or time.monotonic() > give_up:
                    raise RuntimeError(f"the engine is not up: {error.details()}") from error
                await asyncio.sleep(0.2)
        yield engine_pb2_grpc.EngineServiceStub(channel), facts


async def _load(facts: Any) -> pb.Load:
    """The newest load the engine's server knows, at most a quarter of a second old."""
    watch = facts.WatchState(pb.WatchStateRequest())
    load: pb.Load = (await watch.read()).load
    watch.cancel()
    return load


def _spec(options: StackOptions, number: int, output_len: int) -> pb.GenerateSpec:
    prompt = [3 + (number * 31 + i) % 30_000 for i in range(options.prompt_len)]
    return pb.GenerateSpec(
        request_id=str(number),
        prompt_token_ids=struct.pack(f"<{len(prompt)}I", *prompt),
        sampling=pb.SamplingParams(temperature=0.0, max_tokens=output_len),
    )


def _output_len(options: StackOptions, number: int) -> int:
    """The first generation ends at different times, so that arrivals spread over the run."""
    if number >= options.requests:
        return options.output_len
    return 1 + options.output_len * (number + 1) // options.requests


async def _drive_session(stub: Any, options: StackOptions, meter: _Meter) -> None:
    """One stream for all requests; hands each one's bytes to a buffer of its own."""
    call = stub.Session()
    hello = pb.Hello(protocol_major=1, client_name="bench")
    await call.write(pb.SessionRequest(hello=hello))
    numbers = itertools.count()
    buffers: dict[int, bytearray] = {}

    async def submit() -> None:
        number = next(numbers)
        buffers[number] = bytearray()
        spec = _spec(options, number, _output_len(options, number))
        await call.write(pb.SessionRequest(submit=pb.Submit(handle=number, spec=spec)))

    try:
        for _ in range(options.requests):
            await submit()
        while (frame := await call.read()) is not grpc.aio.EOF:
            if frame.HasField("failed"):
                raise InvalidRequest(frame.failed.message)
            if not frame.HasField("step"):
                continue
            step, offset = frame.step, 0
            tokens = step.token_ids
            meter.count(len(tokens) // 4, step.t_unix_ns)
            for handle, count in zip(step.handles, step.counts, strict=True):
                stop = offset + 4 * count
                buffers[handle] += tokens[offset:stop]
                offset = stop
            for row in step.finished:
                done = buffers.pop(step.handles[row.row])
                assert len(done) == 4 * row.finish.usage.output_tokens, "tokens were lost"
                await submit()
    finally:
        call.cancel()


async def _drive_generate(stub: Any, options: StackOptions, meter: _Meter) -> None:
    """One RPC per request."""
    numbers = itertools.count()

    async def generate() -> None:
        while True:
            number = next(numbers)
            spec = _spec(options, number, _output_len(options, number))
            call = stub.Generate(pb.GenerateRequest(spec=spec))
            try:
                while (response := await call.read()) is not grpc.aio.EOF:
                    meter.count(len(response.token_ids) // 4, 0)
            finally:
                call.cancel()

    async with asyncio.TaskGroup() as group:
        for _ in range(options.requests):
            group.create_task(generate())
