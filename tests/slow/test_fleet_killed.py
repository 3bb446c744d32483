"""Engines and frontends that die, stop, or cannot be reached any more, with many streams open."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from tests.e2e.real_stack import HOST
from tests.slow.fleets import (
    Client,
    Site,
    Stream,
    Wire,
    prompts,
    right_answers,
    site,
    undisturbed,
    up,
)
from tests.waiting import free_port, stopwatch, until

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(1200)]  # many processes

NUM_STREAMS, NUM_TOKENS = 200, 60
ROWS = 48
"""Of each engine: 200 streams over three of them leave some without a first token."""
STEP = "--simulated-step-ms=100"
OK, GONE = grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE
Blow = Callable[[], Awaitable[None]]
Clock = Callable[[], float]
Three = tuple[Site, list[int]]
"""Engines, by their ports."""


@pytest.fixture
def awake_s() -> Iterator[Clock]:
    """Bounds of a second or two do not hold by the wall where the machine itself stands still."""
    with stopwatch() as read:
        yield read


async def under_blow(client: Client, blow: Blow) -> tuple[list[Stream], float]:
    """Runs all streams; `blow` falls when most of them have begun. Its time is returned too."""
    asked = prompts(NUM_STREAMS)
    whole = right_answers(asked, NUM_TOKENS)
    streams = [Stream(prompt, NUM_TOKENS) for prompt in asked]
    tasks = [asyncio.create_task(client.run(one)) for one in streams]
    await until(lambda: sum(len(one.tokens) >= 3 for one in streams) >= 2 * ROWS)
    at = client.clock()
    await blow()
    await asyncio.gather(*tasks)
    for stream, tokens in zip(streams, whole, strict=True):
        stream.check(tokens)
    return streams, at


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Three]:
    """For all tests that leave them up and idle; frontends are their own."""
    flags = (f"--max-rows={ROWS}", STEP)
    with site(tmp_path_factory.mktemp("three"), engine_flags=flags) as made:
        engines = [free_port() for _ in range(3)]
        for port in engines:
            made.start_engine(port)
        yield made, engines


@asynccontextmanager
async def before(made: Site, *engines: int) -> AsyncIterator[int]:
    """A frontend with a session to each of them."""
    front = free_port()
    made.start_frontend(front, *engines)
    await up(made, front, *engines)
    yield front
    made.stop(front)


async def test_an_engine_killed_under_200_streams(three: Three, awake_s: Clock) -> None:
    """Streams that had begun there end with a status within 2 s, the others do not notice; the
    engine is used again when it is back."""
    made, engines = three
    async with before(made, *engines) as front, Client(made.grpc_ports[front], awake_s) as client:

        async def kill() -> None:
            made.kill(engines[0])

        streams, at = await under_blow(client, kill)
        cut = [one for one in streams if one.code is not OK]
        retried = await made.metric(front, "tidemill_fleet_retries_total")
        slowest = max(one.ended - at for one in cut)
        print(f"{len(cut)} cut, the last after {slowest:.2f} s; {retried:.0f} moved")
        assert {one.code for one in cut} == {GONE}
        assert 1 <= len(cut) <= NUM_STREAMS / 2, "those of the other engines noticed"
        assert all(one.tokens for one in cut), "one without a token was not moved"
        assert all("the engine was lost" in one.detail for one in cut)
        assert slowest <= 2.0
        assert retried >= 1

        made.start_engine(engines[0])
        await up(made, front, *engines)
        routed = f'tidemill_fleet_requests_routed_total{{engine="{HOST}:{engines[0]}"}}'
        number = await made.metric(front, routed)
        await undisturbed(client, prompts(30), 3)
        assert await made.metric(front, routed) > number, "it is back, and gets nothing"


async def test_control_without_a_blow_nothing_is_cut_or_moved(three: Three) -> None:
    made, engines = three
    async with before(made, *engines) as front:

        async def nothing() -> None:
            await asyncio.sleep(0)

        async with Client(made.grpc_ports[front]) as client:
            streams, _ = await under_blow(client, nothing)
        assert {one.code for one in streams} == {OK}
        assert await made.metric(front, "tidemill_fleet_retries_total") == 0


def test_control_a_wrong_repeated_or_missing_token_is_seen() -> None:
    whole = [3, 1, 4, 1]
    Stream((), 4, [3, 1, 4, 1], OK).check(whole)
    Stream((), 4, [3, 1], GONE).check(whole)
    for tokens in ([3, 1, 1, 4], [3, 1, 4], [3, 3, 1, 4], [3, 1, 4, 1, 3]):
        with pytest.raises(AssertionError):
            Stream((), 4, tokens, OK).check(whole)


async def test_a_frontend_killed_leaves_nothing_and_hurts_nobody(
    tmp_path: Path, awake_s: Clock
) -> None:
    """Its streams end with a status within 2 s, and the engine lets go of their requests; clients
    of the other one go on."""
    engine, fronts = free_port(), [free_port(), free_port()]
    with site(tmp_path, engine_flags=("--max-rows=256", STEP)) as made:
        made.start_engine(engine)
        for port in fronts:
            made.start_frontend(port, engine)
            await up(made, port, engine)
        async with (
            Client(made.grpc_ports[fronts[0]], awake_s) as doomed,
            Client(made.grpc_ports[fronts[1]]) as other,
        ):
            asked = prompts(20)
            whole = right_answers(asked, 80)
            theirs = [Stream(prompt, 1000) for prompt in prompts(NUM_STREAMS)]
            mine = [Stream(prompt, 80) for prompt in asked]
            dying = [asyncio.create_task(doomed.run(one)) for one in theirs]
            living = [asyncio.create_task(other.run(one)) for one in mine]
            await until(lambda: all(one.tokens for one in (*theirs, *mine)))
            at = awake_s()
            made.kill(fronts[0])
            await asyncio.gather(*dying)
            assert {one.code for one in theirs} == {GONE}
            assert max(one.ended - at for one in theirs) <= 2.0
            await asyncio.gather(*living)
            for stream, tokens in zip(mine, whole, strict=True):
                assert stream.code is OK
                stream.check(tokens)
            while await made.metric(fronts[1], "tidemill_num_requests_running"):
                assert awake_s() - at < 30, "the engine still works for the dead one"
                await asyncio.sleep(0.1)
            assert await made.metric(fronts[1], "tidemill_kv_cache_usage_perc") == 0


@pytest.mark.parametrize("how", ["the wire is cut", "the server stops", "the rank stops"])
async def test_silence_is_noticed_and_traffic_moves(three: Three, how: str, awake_s: Clock) -> None:
    """Nothing is closed, nothing answers. Where packets are dropped it gets no new work, and its
    streams have ended, within 2 s; where it stands still after 10. When it is back, it is used
    again."""
    within_s = 2.0 if how == "the wire is cut" else 12.2
    made, engines = three
    async with Wire(engines[0]) as wire, before(made, wire.port, engines[1]) as front:
        service = made.services[engines[0]]
        victim = service.rank_pid if how == "the rank stops" else service.pid
        async with Client(made.grpc_ports[front], awake_s) as client:
            whole = right_answers(prompts(NUM_STREAMS), 40)
            streams = [Stream(prompt, 40) for prompt in prompts(NUM_STREAMS)]
            tasks = [asyncio.create_task(client.run(one)) for one in streams]
            await until(lambda: sum(bool(one.tokens) for one in streams) >= 3 * ROWS // 2)
            if how == "the wire is cut":
                wire.cut()
            else:
                os.kill(victim, signal.SIGSTOP)
            name = f"p{wire.port}"
            at = awake_s()
            while (await made.states(front))[wire.port] == "ready":
                assert awake_s() - at < 10, "it still counts as ready"
                await asyncio.sleep(0.05)
            print(f"{how}: seen after {awake_s() - at:.1f} s")
            for _ in range(4):
                assert (await client.run(Stream((5, 6), 3))).code is OK
            if how != "the rank stops":  # a core that is slow keeps what it has for longer
                await asyncio.wait_for(asyncio.gather(*tasks), 60)
                cut = [one for one in streams if one.code is not OK]
                assert 1 <= len(cut) <= ROWS
                assert all(one.code is GONE and one.tokens for one in cut)
                assert max(one.ended - at for one in cut) <= within_s
                print(f"{how}: ended after {max(one.ended - at for one in cut):.2f} s")
            if how == "the wire is cut":
                wire.mend()
            else:
                os.kill(victim, signal.SIGCONT)
            await made.until_states(front, 60, **{name: "ready"})
            await asyncio.gather(*tasks)
            if how == "the rank stops":
                assert {one.code for one in streams} == {OK}, "they went on where they were"
            for stream, tokens in zip(streams, whole, strict=True):
                stream.check(tokens)
            await undisturbed(client, prompts(12), 3)
