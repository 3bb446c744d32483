"""Starts that cannot work on the real stack: ports in use, and files of a model that are broken.

Each one says what to do, at the engine's last word and at both faces of a frontend.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.e2e.real_stack import (
    HOST,
    ROOT,
    check_away,
    connected,
    engine,
    frontend,
    good,
    running,
)
from tests.service.engine_fixtures import rest
from tests.waiting import eventually, free_port
from tidemill.runtime.rpc import channel_options
from tidemill.v1 import engine_pb2 as pb
from tidemill.v1 import engine_pb2_grpc

DEMO = ROOT / "tidemill" / "builtin" / "demo"


@pytest.mark.parametrize(
    ("verb", "flag"),
    [
        ("engine", "--engine-port"),
        ("frontend", "--http-port"),
        ("frontend", "--grpc-port"),
        ("serve", "--engine-port"),
        ("serve", "--http-port"),
        ("serve", "--grpc-port"),
    ],
)
def test_port_in_use(tmp_path: Path, verb: str, flag: str) -> None:
    free = {"engine": ("engine",), "frontend": ("http", "grpc")}
    names = free.get(verb, ("engine", "http", "grpc"))
    with socket.create_server((HOST, 0)) as other:
        port = other.getsockname()[1]
        flags = [f"--{name}-port=0" for name in names]
        with running(tmp_path, verb, *flags, f"{flag}={port}") as service:
            assert service.wait() == 1
    assert re.search(rf"{HOST}:{port}.*in use.*another .*{flag} \(0 takes a free", service.log)
    assert "Traceback" not in service.log


def test_flags_that_do_not_fit_are_told_alone(tmp_path: Path) -> None:
    """Nothing is lost or gone: the flag, its value and the fix are all there is to say."""
    with running(tmp_path, "engine", "demo", "--engine-port=0", "--kv-connector=shm") as service:
        assert service.wait() == 1
    refusal = (
        "tidemill engine: kv_connector is 'shm', which only engines that move KV read; leave it "
        "out, or pass --role prefill or --role decode"
    )
    assert service.log == f"{refusal}\n"


def test_flags_that_do_not_fit_the_model_are_told_once(tmp_path: Path) -> None:
    with running(
        tmp_path, "engine", "demo", "--engine-port=0", "--max-model-len=999999"
    ) as service:
        assert service.wait() == 1
    refusal = "cannot start: max_model_len 999999 exceeds the checkpoint's limit"
    assert f'"{refusal}' in service.log.splitlines()[-1]
    assert service.log.count(refusal) == 1


# ---------------------------------------------------------------- files


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def scramble(path: Path) -> None:
    path.write_bytes(b"\xff" * 64 + path.read_bytes()[64:])


# name: (what happens to a copy of demo, words of the engine's last state)
BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "weights cut off": (
        lambda folder: cut(folder / "model.safetensors", 1 << 20),
        r"model\.safetensors.*(fetch|download)",
    ),
    "weights without a header": (
        lambda folder: scramble(folder / "model.safetensors"),
        r"model\.safetensors.*(fetch|download)",
    ),
    "no weights": (
        lambda folder: (folder / "model.safetensors").unlink(),
        r"safetensors.*--load-format dummy",
    ),
    "tokenizer.json cut off": (
        lambda folder: cut(folder / "tokenizer.json", 200),
        r"tokenizer\.json is not valid JSON.*truncated: fetch the file again",
    ),
}


FAST = ("weights cut off", "tokenizer.json cut off")
CASES = [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in BROKEN]


@pytest.mark.parametrize("name", CASES)
async def test_broken_files_of_a_model(tmp_path: Path, name: str) -> None:
    """The engine's last state, its last line and its status say why it cannot start."""
    damage, words = BROKEN[name]
    folder, port = tmp_path / "model", free_port()
    shutil.copytree(DEMO, folder)
    damage(folder)
    with engine(tmp_path, port, str(folder)) as served:
        async with grpc.aio.insecure_channel(f"{HOST}:{port}", channel_options(4 << 20)) as channel:
            stub = engine_pb2_grpc.EngineInfoServiceStub(channel)
            call, seen = stub.WatchState(pb.WatchStateRequest(), wait_for_ready=True), []
            with suppress(grpc.aio.AioRpcError):
                async for state in call:
                    seen.append(state)
        assert seen[-1].state == pb.ENGINE_STATE_ERROR
        assert re.search(words, seen[-1].detail), seen[-1]
        assert await asyncio.to_thread(served.wait) == 1
    assert re.search(words, served.log)
    assert "Traceback" not in served.log


async def test_a_model_without_a_tokenizer(tmp_path: Path) -> None:
    """The engine serves token ids; a frontend says what it needs, and serves once it has it."""
    folder, port = tmp_path / "model", free_port()
    shutil.copytree(DEMO, folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    words = r"no tokenizer to serve: .*the engine with --tokenizer FOLDER, or the frontend with it"
    with (
        engine(tmp_path, port, str(folder)) as served,
        frontend(tmp_path, port) as bare,
        frontend(tmp_path, port, f"--tokenizer={DEMO}", "--served-model-name=demo") as stack,
    ):
        stack.wait_ready()
        assert re.search(words, served.log)
        async with connected(stack) as faces:
            await good(faces)
            with pytest.raises(grpc.aio.AioRpcError, match=words) as caught:
                await rest(faces.info.GetTokenizer(pb.GetTokenizerRequest()))
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        eventually(lambda: re.search(words, bare.health()["last_error"]), "no advice")
        await check_away(bare, rf"cannot serve the engine at {HOST}:{port}: {words}")
