"""An engine whose wall clock jumps by an hour while deadlines run: real processes, and a library
before libc that answers the question for the time of day. The monotonic clock is the real one."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from tests.otlp import collecting
from tests.service.engine_fixtures import pack, rest
from tests.service.test_engine_health import until_serving
from tests.unit.test_telemetry import HEADER
from tests.waiting import PATIENCE_S
from tidemill.v1 import engine_pb2 as pb
from tidemill.v1 import engine_pb2_grpc

COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("g++")
SHIM = """
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile long *ahead;

__attribute__((constructor)) static void open_clock(void) {
  int file = open(getenv("CLOCK_AHEAD"), O_RDONLY);
  ahead = (const volatile long *)mmap(0, sizeof(long), PROT_READ, MAP_SHARED, file, 0);
}
int clock_gettime(clockid_t clock, struct timespec *now) {
  int status = (int)syscall(SYS_clock_gettime, clock, now);
  if (clock == CLOCK_REALTIME && ahead) now->tv_sec += *ahead;
  return status;
}
int gettimeofday(struct timeval *__restrict now, void *__restrict zone) {
  struct timespec exact;
  clock_gettime(CLOCK_REALTIME, &exact);
  now->tv_sec = exact.tv_sec;
  now->tv_usec = exact.tv_nsec / 1000;
  return 0;
}
time_t time(time_t *now) {
  struct timespec exact;
  clock_gettime(CLOCK_REALTIME, &exact);
  if (now) *now = exact.tv_sec;
  return exact.tv_sec;
}
"""
HOUR_S = 3600
MAIN = """
import asyncio, sys
from engine_service.config import EngineConfig
from engine_service.server.launch import EngineServer
async def main():
    config = EngineConfig(engine_port=0, simulated_step_ms=5.0, otlp_endpoint=sys.argv[1])
    server = await EngineServer.start(config, rank_module="tests.service.fake_core")
    print(server.port, flush=True)
    return await server.run()
sys.exit(asyncio.run(main()))
"""


class Clock:
    """The wall clock of processes: how many seconds it is ahead, in memory that they share."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.write_bytes(bytes(8))

    def set(self, ahead_s: int) -> None:
        """In place, at once: the processes have the file mapped."""
        with self._path.open("r+b", buffering=0) as file:
            file.write(ahead_s.to_bytes(8, sys.byteorder, signed=True))


def library(folder: Path) -> str:
    """What is loaded before libc, compiled."""
    assert COMPILER is not None
    (folder / "shim.c").write_text(SHIM)
    made = folder / "shim.so"
    command = [COMPILER, "-x", "c", "-shared", "-fPIC", "-O1", "-o", made, folder / "shim.c"]
    subprocess.run(command, check=True)
    return str(made)


@contextmanager
def running(folder: Path, endpoint: str) -> Iterator[tuple[int, Clock]]:
    """An engine server and its rank behind a clock of their own; their monotonic clock is real."""
    clock = Clock(folder / "clock")
    process = subprocess.Popen(
        [sys.executable, "-c", MAIN, endpoint],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
        env={
            **os.environ,
            "LD_PRELOAD": library(folder),
            "CLOCK_AHEAD": str(folder / "clock"),
        },
    )
    try:
        assert process.stdout is not None
        yield int(process.stdout.readline()), clock
        process.terminate()
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.communicate()


def asked(max_tokens: int, **fields: object) -> pb.GenerateRequest:
    sampling = pb.SamplingParams(max_tokens=max_tokens)
    return pb.GenerateRequest(
        spec=pb.GenerateSpec(prompt_token_ids=pack(7), sampling=sampling, **fields)
    )


@pytest.mark.skipif(COMPILER is None, reason="there is no C compiler")
@pytest.mark.parametrize("jump_s", [HOUR_S, -HOUR_S])
async def test_deadlines_and_spans_outlive_a_jump(tmp_path: Path, jump_s: int) -> None:
    """Forward, nothing ends early; backward, nothing ends late; no span is an hour long."""
    with collecting() as (collector, endpoint), running(tmp_path, endpoint) as (port, clock):
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = engine_pb2_grpc.EngineServiceStub(channel)
            await asyncio.wait_for(until_serving(channel), PATIENCE_S)
            first = await rest(stub.Generate(asked(2)))
            calm_ns = first[-1].finish.timings.arrival_unix_ns
            assert abs(calm_ns / 1e9 - time.time()) < HOUR_S / 2
            began = time.monotonic()
            late = stub.Generate(asked(30_000, timeout_ms=3000))
            whole = stub.Generate(asked(200, timeout_ms=120_000, traceparent=HEADER))
            await late.read()
            clock.set(jump_s)
            answers = await rest(whole)
            assert answers[-1].finish.reason == pb.FINISH_REASON_LENGTH
            ends = await asyncio.wait_for(rest(late), PATIENCE_S)
            assert ends[-1].finish.reason == pb.FINISH_REASON_DEADLINE
            assert time.monotonic() - began > 2.9
            after = await rest(stub.Generate(asked(2)))
            jumped_ns = after[-1].finish.timings.arrival_unix_ns
            assert abs(jumped_ns - calm_ns - jump_s * 1e9) < HOUR_S / 2 * 1e9, "no jump was made"
    spans = collector.of_trace(HEADER[3:35])
    assert len(spans) >= 3
    for span in spans:
        assert 0 <= span.end_time_unix_nano - span.start_time_unix_nano < PATIENCE_S * 1e9
    (root,) = (span for span in spans if span.name.endswith("/Generate"))
    for span in spans:
        assert root.start_time_unix_nano <= span.start_time_unix_nano
        assert span.end_time_unix_nano <= root.end_time_unix_nano
