"""Wrong moments on the real stack: clients that leave, deadlines, engines that die.

After each one other requests go on, and nothing is left over.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.e2e.real_stack import (
    HOST,
    START_S,
    Faces,
    Service,
    Stack,
    check_away,
    connected,
    engine,
    frontend,
    good,
    is_gone,
    text_call,
    until_idle,
)
from tests.service.engine_fixtures import rest, spec
from tests.waiting import PATIENCE_S, eventually, free_port, stopwatch
from tidemill.runtime.rpc import to_error
from tidemill.v1 import engine_pb2 as pb

LONG = {"max_tokens": 2000, "ignore_eos": True}
ENDLESS = pb.StopSpec(ignore_eos=True)


# ---------------------------------------------------------------- clients


def leave_http(faces: Faces, stream: bool) -> Any:
    work = faces.http.post("/v1/completions", json={"prompt": "a", "stream": stream, **LONG})
    return asyncio.ensure_future(work)


def leave_engine(faces: Faces) -> Any:
    request = pb.GenerateRequest(spec=spec(5, max_tokens=2000, stop=ENDLESS))
    return faces.engine.Generate(request)


LEAVING: dict[str, Callable[[Faces], Any]] = {
    "HTTP": lambda faces: leave_http(faces, False),
    "HTTP stream": lambda faces: leave_http(faces, True),
    "Generate": lambda faces: text_call(faces.text, "Generate"),
    "GenerateStream": lambda faces: text_call(faces.text, "GenerateStream"),
    "engine": leave_engine,
}


@pytest.mark.parametrize("name", LEAVING)
async def test_client_gone_before_the_first_token(faces: Faces, name: str) -> None:
    """It waits behind four long requests, which do not notice."""
    async with all_rows_taken(faces):
        call = LEAVING[name](faces)
        await faces.until_busy(lambda running, waiting, *_: (running, waiting) == (4, 1))
        call.cancel()
        await faces.until_busy(lambda running, waiting, *_: (running, waiting) == (4, 0))
        assert not faces.session.ends


@asynccontextmanager
async def all_rows_taken(faces: Faces) -> AsyncIterator[None]:
    """Inside, requests wait: four others run."""
    rows = range(1, 5)
    for handle in rows:
        await faces.session.submit(handle, 5, max_tokens=2000, stop=ENDLESS)
    for handle in rows:
        await faces.session.first_token(handle)
    yield
    await faces.session.send(abort=pb.AbortHandles(handles=rows))
    await faces.session.drain(*rows)
    assert {end[0].reason for end in faces.session.ends.values()} == {pb.FINISH_REASON_ABORTED}


@pytest.mark.parametrize("stream", [False, True])
async def test_deadline_over_http(faces: Faces, stream: bool) -> None:
    before = await faces.count("deadline")
    headers = {"x-request-timeout-ms": "1"}  # at least as much is left to the engine
    body = {"prompt": "a", "stream": stream, **LONG}
    async with all_rows_taken(faces):
        answer = await faces.http.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 504
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("timeout_error", "deadline_exceeded")
    assert re.search(r"within 0\.001 s; ask for fewer tokens or allow more time", error["message"])
    await until_counted(faces, before + 1)


async def until_counted(faces: Faces, wanted: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while await faces.count("deadline") < wanted:  # noqa: ASYNC110 - in another process
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("face", ["Generate", "GenerateStream", "engine"])
async def test_deadline_of_a_call(faces: Faces, face: str) -> None:
    """The client raises it by itself, and some of the calls never leave its machine; the engine
    ends the others, and counts them."""
    before = await faces.count("deadline")
    request = pb.GenerateRequest(spec=spec(5, max_tokens=2000, stop=ENDLESS))
    for attempt in range(60):
        timeout = 0.001 * 1.1**attempt  # 0.3 s at last
        if face == "engine":
            call = faces.engine.Generate(request, timeout=timeout)
        else:
            call = text_call(faces.text, face, timeout=timeout)
        assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        if attempt >= 30 and await faces.count("deadline") > before:
            break
    await until_counted(faces, before + 1)


async def test_deadline_of_a_submit(faces: Faces) -> None:
    before = await faces.count("deadline")
    await faces.session.submit(1, 5, max_tokens=2000, stop=ENDLESS, timeout_ms=1)
    await faces.session.drain(1)
    assert faces.session.ends[1][0].reason == pb.FINISH_REASON_DEADLINE
    await until_counted(faces, before + 1)


# ---------------------------------------------------------------- services


@pytest.mark.parametrize("victim", ["rank", "server"])
async def test_the_engine_is_away_comes_dies_and_comes_back(tmp_path: Path, victim: str) -> None:
    port = free_port()
    away = rf"the engine at {HOST}:{port} is not up: .*try again shortly"
    with frontend(tmp_path, port) as stack:
        await check_away(stack, away)
        with engine(tmp_path, port, "demo") as served:
            await asyncio.to_thread(until_ready, stack, served)
            before = stack.num_handles()
            async with connected(stack) as faces:
                await good(faces)
                rank = served.rank_pid
                await die_in_the_middle(faces, rank if victim == "rank" else served.pid)
            assert await asyncio.to_thread(served.wait) == (1 if victim == "rank" else -9)
            await asyncio.to_thread(eventually, lambda: is_gone(rank), "the rank still runs")
            if victim == "rank":
                assert "killed by SIGKILL; this process ends, restart it" in served.log
        await check_away(stack, away)
        with engine(tmp_path, port, "demo") as served:
            await asyncio.to_thread(until_ready, stack, served)
            async with connected(stack) as faces:
                await good(faces)
                await until_idle(faces)
            eventually(
                lambda: stack.num_handles()["frontend"] <= before["frontend"] + 2,
                f"open files before {before}, now {stack.num_handles()}",
            )


def until_ready(stack: Stack, served: Service) -> None:
    """The frontend takes requests soon after the engine does: it waits for a part of the time that
    a start takes, however long the engine was away; and for its turn on a busy machine."""
    with stopwatch() as awake_s:
        eventually(lambda: '"ready:' in served.log, "the engine is not ready", START_S)
        ready_s = awake_s()
        stack.wait_ready()
        assert awake_s() - ready_s < 3.0 + 0.5 * ready_s
    levels = [json.loads(line) for line in served.log.splitlines() if line.startswith("{")]
    stages = [line["message"] for line in levels if "loading" in line["message"]]
    assert len(stages) == len({stage.partition(" ")[2].rstrip("0123456789/ ") for stage in stages})


async def die_in_the_middle(faces: Faces, pid: int) -> None:
    """Every client of a running request is told, in the way of its face."""
    whole = leave_http(faces, False)
    text = text_call(faces.text, "GenerateStream")
    await text.read()
    async with faces.http.stream(
        "POST", "/v1/completions", json={"prompt": "a", "stream": True, **LONG}
    ) as answer:
        assert answer.status_code == 200
        lines = answer.aiter_lines()
        assert (await anext(lines)).startswith("data: ")
        await faces.session.submit(1, 5, max_tokens=2000, stop=ENDLESS)
        await faces.session.first_token(1)
        await faces.until_busy(lambda running, *_: running == 4)  # the whole answer is under way
        os.kill(pid, signal.SIGKILL)
        seen = [line async for line in lines if line]
    assert seen[-1] == "data: [DONE]"
    error = json.loads(seen[-2].removeprefix("data: "))["error"]
    words = "the engine was lost while it worked on this request|engine core is gone.*SIGKILL"
    assert (error["type"], error["code"]) == ("unavailable_error", "engine_dead")
    assert re.search(words, error["message"])
    answer = await whole
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_dead")
    with pytest.raises(grpc.aio.AioRpcError, match=words) as caught:
        await rest(text)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert to_error(caught.value).reason == "ENGINE_DEAD"
    assert await faces.session.read_to_status() is grpc.StatusCode.UNAVAILABLE
