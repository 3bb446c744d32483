"""An engine whose ranks torchrun has started, on two launchers that stand for hosts: it serves, and
ends everywhere when a rank is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import pytest

from tests.service.distant_ranks import TOKEN
from tests.service.engine_fixtures import spec, unpack
from tests.service.test_engine_ranks import children
from tests.service.test_ranks_watched import BOUND_S, ROOT, is_gone
from tests.waiting import eventually, free_port, stopwatch
from tidemill.v1 import engine_pb2 as pb
from tidemill.v1 import engine_pb2_grpc

pytestmark = [pytest.mark.slow, pytest.mark.alone]

START_S = 240.0
ENGINE = ["-m", "engine_service", "demo", "--device=cpu", "--max-rows=4", "--seed=3"]


@contextmanager
def started(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, *command], cwd=ROOT, env=env)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(60)
        finally:
            process.kill()
            process.wait()


def ready_stub(port: int, *processes: subprocess.Popen[bytes]) -> engine_pb2_grpc.EngineServiceStub:
    """Of the engine that these processes are, or fails as soon as one of them has ended."""
    often = [("grpc.max_reconnect_backoff_ms", 1000)]  # by itself it waits for up to two minutes
    channel = grpc.insecure_channel(f"127.0.0.1:{port}", often)
    info = engine_pb2_grpc.EngineInfoServiceStub(channel)
    began = time.monotonic()
    while time.monotonic() - began < START_S:
        try:
            if info.GetEngineInfo(pb.GetEngineInfoRequest()).limits.max_model_len:
                return engine_pb2_grpc.EngineServiceStub(channel)
        except grpc.RpcError:
            ended = [process.returncode for process in processes if process.poll() is not None]
            assert not ended, f"it has ended with {ended} before it was ready"
            time.sleep(0.2)
    raise AssertionError("it does not become ready")


def tokens(stub: engine_pb2_grpc.EngineServiceStub) -> list[int]:
    asked = pb.GenerateRequest(spec=spec(84, 104, 101, max_tokens=60))
    return [token for part in stub.Generate(asked) for token in unpack(part.token_ids)]


def below(pid: int) -> list[int]:
    """All processes that a process has started, and that these have."""
    own = children(pid)
    return own + [pid for child in own for pid in below(child)]


def named(pids: list[int], word: str) -> int:
    (found,) = [pid for pid in pids if word.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return found


@pytest.mark.timeout(900)
def test_two_launchers_serve_as_one_engine_and_end_together(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN)
    port = free_port(3)
    meet, leader = port + 1, port + 2
    with started([*ENGINE, f"--engine-port={port}"]) as one:
        alone = tokens(ready_stub(port, one))
    assert len(alone) == 60
    flags = [
        "--executor=torchrun", "--tensor-parallel-size=2", f"--group-token-file={tmp_path}/token",
        f"--leader-address=127.0.0.1:{leader}", f"--engine-port={port}",
    ]  # fmt: skip
    launch = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    launch += ["--master-addr=127.0.0.1", f"--master-port={meet}"]
    with ExitStack() as stack:
        hosts = [
            stack.enter_context(started([*launch, f"--node-rank={rank}", *ENGINE, *flags]))
            for rank in range(2)
        ]
        stub = ready_stub(port, *hosts)
        assert tokens(stub) == alone
        pids = [pid for host in hosts for pid in below(host.pid)]
        call = stub.Generate(pb.GenerateRequest(spec=spec(84, max_tokens=1900)))
        next(call)
        with stopwatch() as awake_s:
            os.kill(named(pids, "engine_service.follower"), signal.SIGKILL)
            with pytest.raises(grpc.RpcError) as caught:
                list(call)
            eventually(lambda: all(map(is_gone, pids)), "a process is left")
            assert awake_s() < BOUND_S
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE  # type: ignore[attr-defined]
        assert "was killed by SIGKILL" in caught.value.details()  # type: ignore[attr-defined]
        assert all(host.wait(60) for host in hosts)
