"""A rank that is lost while pages are moved ends its engine as in a step, and no other engine."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from engine_service.server import transfer_out
from engine_service.server.launch import EngineServer
from tests.service.engine_fixtures import rest, stubs
from tests.service.test_engine_rank import MODEL
from tests.service.test_engine_ranks import AWAKE_S, children, is_gone
from tests.service.test_kv_transfer import PAGE, address, answer, asking, engines, is_free
from tests.waiting import PATIENCE_S, stopwatch, until
from tidemill.runtime.rpc import to_error

NUM_PAGES = 60
PROMPT = [3 + i % 500 for i in range(NUM_PAGES * PAGE + 5)]
PAIR = {"device": "cpu", "log_level": "warning", "kv_connector": "grpc"}
"""What lies in shared memory and is in no message yet goes with the prefill engine."""


@pytest.fixture(autouse=True)
def model(tmp_path: Path) -> None:
    """Two key-value heads: either of two ranks has something of every page."""
    (tmp_path / "config.json").write_text(json.dumps({**MODEL, "num_key_value_heads": 2}))


@contextmanager
def at_third_piece(target: EngineServer, act: Any) -> Iterator[list[Any]]:
    """`act` is called when the target has been given three pieces; what it has been given."""
    counts = target.desk.observer.metrics.transfers
    count, seen = counts.moved, []

    def moved(model: str, direction: str, piece: Any) -> None:
        count(model, direction, piece)
        seen.append(piece)
        if len(seen) == 3:
            act()

    counts.moved = moved  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        counts.moved = count  # type: ignore[method-assign]


async def ended(server: EngineServer, pids: list[int]) -> str:
    """Waits until it says that it is dead and its ranks are gone, within the promised time; why."""
    with stopwatch() as awake_s:
        await asyncio.wait_for(server.desk.dead.wait(), PATIENCE_S)
        await until(lambda: server._rank._process.poll() is not None)
        await until(lambda: all(map(is_gone, pids)))
        assert awake_s() < AWAKE_S
    return str(server.desk.core.lost)


def told(sent: signal.Signals, pid: int) -> str:
    how = "was killed by SIGKILL" if sent is signal.SIGKILL else "has shown no life for "
    return f"rank 1 (pid {pid}) {how}"


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(300)
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("grid", ["tensor_parallel_size", "pipeline_parallel_size"])
async def test_a_rank_of_the_prefill_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: signal.Signals, grid: str
) -> None:
    """Rank 0 stands between two steps, waiting for what that one has of a page."""
    monkeypatch.setattr(transfer_out, "PIECE_BYTES", 1)  # a page each, more than may be on the way
    flags = {"role": "prefill", grid: 2, **PAIR}, {"role": "decode", **PAIR}
    async with engines(tmp_path, *flags) as (source, target), stubs(target) as here:
        (follower,) = children(source._rank.pid)
        right, _ = await answer(here, asking(PROMPT, cache_salt="alone"))
        request = asking(PROMPT, address(source), cache_salt="well")
        assert await answer(here, request) == (right, NUM_PAGES * PAGE)
        pids = [source._rank.pid, follower]
        with at_third_piece(target, lambda: os.kill(follower, sent)) as seen:
            request = asking(PROMPT, address(source), cache_salt="lost")
            held = asyncio.create_task(answer(here, request))
            await until(lambda: len(seen) >= 3)
            assert told(sent, follower) in await ended(source, pids)
            assert await held == (right, len(seen) * PAGE)
        assert 3 <= len(seen) < NUM_PAGES
        again = asking(PROMPT, address(source), cache_salt="again")
        assert await answer(here, again) == (right, 0)


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(300)
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_rank_of_the_decode_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: signal.Signals
) -> None:
    monkeypatch.setattr(transfer_out, "PIECE_BYTES", 1)
    several = {"role": "decode", "tensor_parallel_size": 2, **PAIR}
    flags = {"role": "prefill", **PAIR}, several, {"role": "decode", **PAIR}
    async with engines(tmp_path, *flags) as (source, target, other):
        (follower,) = children(target._rank.pid)
        pids = [target._rank.pid, follower]
        async with stubs(target) as here:
            with at_third_piece(target, lambda: os.kill(follower, sent)) as seen:
                request = asking(PROMPT, address(source), cache_salt="lost")
                held = asyncio.create_task(rest(here.Generate(request)))
                await until(lambda: len(seen) >= 3)
                assert told(sent, follower) in await ended(target, pids)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await held
                assert to_error(caught.value).reason == "ENGINE_DEAD"
        await until(lambda: is_free(source))
        async with stubs(other) as there:
            right, _ = await answer(there, asking(PROMPT, cache_salt="alone"))
            again = asking(PROMPT, address(source), cache_salt="again")
            assert await answer(there, again) == (right, NUM_PAGES * PAGE)
