"""Engines on a GPU as their users run them: KV that goes from one to another, and lost processes,
which leave the device as it was."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import grpc
import pytest
import torch

from tests.e2e.real_stack import HOST, START_S, engine, is_gone
from tests.equivalence.test_kv_transfer import MOVED, check_moved
from tests.gpu.test_ranks import SPARE
from tests.service.engine_fixtures import spec, unpack
from tests.waiting import PATIENCE_S, eventually, free_port
from tidemill.v1 import engine_pb2 as pb
from tidemill.v1 import engine_pb2_grpc as rpc

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ENDS_S = 5.0
"""What is promised: the group ends, and the device is free."""
FLAGS = ("demo", "--device=cuda", "--dtype=float32", "--memory-fraction=0.2")
STREAMS, TOKENS = 4, 1900


@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("name", MOVED)
def test_moved_prompts_go_on_as_one_engine(tmp_path: Path, name: str, enforce_eager: bool) -> None:
    flags = {"device": "cuda", "dtype": "float32", "num_pages": 64}
    check_moved(tmp_path, name, **flags, enforce_eager=enforce_eager)


def taken() -> int:
    """Bytes of the device that somebody has."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(0)
    return int(total - free)


def asking(number: int, max_tokens: int) -> pb.GenerateRequest:
    asked = spec(84, 104, 101, number, max_tokens=max_tokens)
    asked.sampling.temperature, asked.stop.ignore_eos = 0.0, True
    return pb.GenerateRequest(spec=asked)


def tokens(stub: rpc.EngineServiceStub) -> list[int]:
    """Of a short request; waits until the engine serves."""
    answers = stub.Generate(asking(1, 40), wait_for_ready=True, timeout=START_S)
    return [token for one in answers for token in unpack(one.token_ids)]


@pytest.mark.parametrize(
    ("lost", "sent"),
    [("rank", signal.SIGKILL), ("rank", signal.SIGSTOP), ("server", signal.SIGKILL)],
)
def test_a_lost_process_leaves_the_device_as_it_was(
    tmp_path: Path, lost: str, sent: signal.Signals
) -> None:
    """Under load: all of the engine ends in time, its clients hear of it, and the next one on that
    port and device serves the same tokens."""
    before, port = taken(), free_port()
    flags = (*FLAGS, "--heartbeat-timeout-s=1", "--hang-timeout-s=2")
    with (
        engine(tmp_path, port, *flags) as service,
        grpc.insecure_channel(f"{HOST}:{port}") as channel,
    ):
        stub = rpc.EngineServiceStub(channel)
        eventually(lambda: ready(port), "no engine", START_S)
        right = tokens(stub)
        assert len(right) == 40
        assert taken() > before + SPARE
        rank = service.rank_pid
        held = [stub.Generate(asking(n, TOKENS), timeout=START_S) for n in range(STREAMS)]
        for call in held:
            next(call)
        os.kill(rank if lost == "rank" else service.pid, sent)
        for call in held:
            with pytest.raises(grpc.RpcError) as caught:
                list(call)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert service.wait(ENDS_S) != 0
        eventually(lambda: is_gone(rank), "the rank lives on", ENDS_S)
        eventually(lambda: taken() <= before + SPARE, "memory of the device is lost", ENDS_S)
    with (
        engine(tmp_path, port, *flags),
        grpc.insecure_channel(f"{HOST}:{port}") as channel,
    ):
        eventually(lambda: ready(port), "no engine", START_S)
        assert tokens(rpc.EngineServiceStub(channel)) == right


def ready(port: int) -> bool:
    with grpc.insecure_channel(f"{HOST}:{port}") as channel:
        info = rpc.EngineInfoServiceStub(channel)
        try:
            call = info.WatchState(pb.WatchStateRequest(), timeout=PATIENCE_S)
            state = next(iter(call)).state
            call.cancel()
        except grpc.RpcError:
            return False
        return bool(state == pb.ENGINE_STATE_READY)
