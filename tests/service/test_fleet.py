"""Several engines behind one frontend: who gets what, and what clients see when engines go.

The engines are small ones in this process; those of tests/slow/test_fleet_killed.py are real.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from frontend.app import FrontendServer
from frontend.config import FrontendConfig
from tests.service.fake_engine import FakeEngine, serving
from tests.service.frontends import make_engine
from tests.waiting import free_port, http_client, until
from tidemill.runtime.errors import InternalError, Overloaded, Unavailable
from tidemill.v1 import engine_pb2 as pb

BODY = {"prompt": "ab", "max_tokens": 4}


class Fleet:
    """Engines by port, and the frontend in front of them."""

    def __init__(self, frontend: FrontendServer, engines: dict[int, FakeEngine]) -> None:
        self.frontend = frontend
        self.engines = engines
        self.desk = frontend.desk

    def http(self) -> httpx.AsyncClient:
        return http_client(f"http://127.0.0.1:{self.frontend.http_port}")

    def states(self) -> list[str]:
        """In the order of `engines`."""
        told = {one["address"]: one["state"] for one in self.desk.fleet.told()}
        return [told[f"127.0.0.1:{port}"] for port in self.engines]

    async def until_states(self, *states: str) -> None:
        await until(lambda: self.states() == list(states))


async def ask(client: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    headers = fields.pop("headers", {})
    return await client.post("/v1/completions", json=BODY | fields, headers=headers)


@asynccontextmanager
async def fleet(
    folder: Path, num: int = 3, *, flags: dict[str, Any] | None = None, **fields: Any
) -> AsyncIterator[Fleet]:
    """`num` engines that are up, and a frontend that has a session with each."""
    async with AsyncExitStack() as opened:
        engines = {}
        for number in range(num):
            engine, _ = make_engine(folder, instance_id=f"fake-{number}", **fields)
            engines[await opened.enter_async_context(serving(engine))] = engine
        addresses = ",".join(f"127.0.0.1:{port}" for port in engines)
        config = FrontendConfig(engine=addresses, http_port=0, grpc_port=0, **(flags or {}))
        frontend = await FrontendServer.start(config)
        opened.push_async_callback(frontend.stop)
        served = Fleet(frontend, engines)
        await until(lambda: len(served.desk.fleet.told()) == num)
        await served.until_states(*["ready"] * num)
        yield served


async def test_every_engine_gets_its_share_and_health_and_metrics_name_each(
    tmp_path: Path,
) -> None:
    async with fleet(tmp_path, flags={"routing": "round_robin"}) as served, served.http() as client:
        for _ in range(6):
            assert (await ask(client)).json()["choices"][0]["text"] == "abab"
        assert [len(one.submits) for one in served.engines.values()] == [2, 2, 2]
        health = (await client.get("/health")).json()
        assert [one["requests_routed"] for one in health["engines"]] == [2, 2, 2]
        metrics = (await client.get("/metrics")).text
        for port in served.engines:
            label = f'{{engine="127.0.0.1:{port}"}}'
            assert f"tidemill_fleet_up{label} 1.0" in metrics
            assert f"tidemill_fleet_requests_routed_total{label} 2.0" in metrics
        assert re.search(r"^tidemill_engine_up\{\S+ 3.0$", metrics, re.MULTILINE)
        assert re.search(r"^tidemill_num_requests_waiting\{\S+ 3.0$", metrics, re.MULTILINE)


async def test_what_has_no_token_goes_elsewhere_and_the_client_sees_nothing(
    tmp_path: Path,
) -> None:
    """Streaming, whole and pooled requests; one that has begun is told."""
    async with fleet(tmp_path, 2, hold_after=2) as served, served.http() as client:
        first, second = served.engines.values()
        second.hold = True  # nothing at all comes from there
        asked = [asyncio.create_task(ask(client, stream=n % 2 == 0)) for n in range(4)]
        await until(lambda: first.live == second.live == 2)
        await until(lambda: first.sent == 4)
        first.hold_after = None
        second.drop_sessions()
        second.instance_id = "another process"
        answers = await asyncio.gather(*asked)
        assert [one.status_code for one in answers] == [200] * 4
        for answer in answers:
            assert "error" not in answer.text
        assert len(first.submits) == 4
        assert sum(one["requests_routed"] for one in served.desk.fleet.told()) == 6
        await until(lambda: served.desk.num_live == served.desk.fleet.num_slots == 0)

        second.hold, first.hold_after, second.hold_after = False, 2, 2
        await served.until_states("ready", "ready")
        asked = [asyncio.create_task(ask(client)) for _ in range(2)]
        await until(lambda: first.live == second.live == 1)
        await until(lambda: second.sent == 2)
        second.drop_sessions()
        first.hold_after = None
        codes = sorted([one.status_code for one in await asyncio.gather(*asked)])
        assert codes == [200, 503], "control: two tokens had come of one"


async def test_pooling_moves_too(tmp_path: Path) -> None:
    async with fleet(tmp_path, 2, flags={"routing": "round_robin"}) as served:
        bad, good = served.engines.values()
        bad.refuse = Unavailable("the engine is draining", reason="DRAINING")
        async with served.http() as client:
            body = {"model": "fake", "input": ["ab", "cd", "ef"]}
            answer = await client.post("/v1/embeddings", json=body)
            assert len(answer.json()["data"]) == 3
        assert bad.pools
        assert len(good.pools) == 3


@pytest.mark.parametrize("error", [Unavailable("away", reason="DRAINING"), InternalError("a bug")])
async def test_a_refusal_is_taken_to_another_engine_but_not_for_ever(
    tmp_path: Path, error: Any
) -> None:
    async with fleet(tmp_path, flags={"routing": "round_robin"}) as served:
        engines = list(served.engines.values())
        engines[0].refuse = error
        async with served.http() as client:
            answers = [await ask(client) for _ in range(3)]
            assert [one.status_code for one in answers] == [200] * 3
            for engine in engines:
                engine.refuse, engine.submits = error, []
            assert (await ask(client)).status_code == error.http_status
            most = 2 if isinstance(error, InternalError) else 3
            assert sum(len(one.submits) for one in engines) == most


async def test_an_engine_that_keeps_failing_is_ejected_and_comes_back(tmp_path: Path) -> None:
    async with fleet(tmp_path, 2, flags={"routing": "round_robin"}) as served:
        member, now = served.desk.fleet.members[0], asyncio.get_running_loop().time
        bad = served.engines[int(member.client.address.rpartition(":")[2])]
        bad.refuse = InternalError("a bug")
        async with served.http() as client:
            while not member.outlier.num_ejections:
                assert (await ask(client)).status_code == 200
            over, seen = member.outlier._until, len(bad.submits)  # a second, as this may last
            assert member.state == "ejected" or now() >= over
            assert seen == 5
            for _ in range(6):
                assert (await ask(client)).status_code == 200
            assert len(bad.submits) == seen or now() >= over
            bad.refuse = None
            await served.until_states("ready", "ready")
            for _ in range(2):
                assert (await ask(client)).status_code == 200
            assert len(bad.submits) > seen
            assert "tidemill_fleet_ejections_total" in (await client.get("/metrics")).text


async def test_a_paused_engine_gets_nothing_new_while_others_are_not(tmp_path: Path) -> None:
    async with (
        fleet(tmp_path, 2, flags={"routing": "round_robin"}) as served,
        served.http() as client,
    ):
        one, other = served.engines.values()
        one.paused = True
        await served.until_states("paused", "ready")
        for _ in range(4):
            assert (await ask(client)).status_code == 200
        assert (len(one.submits), len(other.submits)) == (0, 4)
        health = (await client.get("/health")).json()
        assert sorted(one["state"] for one in health["engines"]) == ["paused", "ready"]
        assert {one["last_error"] for one in health["engines"]} == {None}
        other.paused = True
        await served.until_states("paused", "paused")
        assert (await client.get("/health")).status_code == 200
        for _ in range(2):
            assert (await ask(client)).status_code == 200
        assert (len(one.submits), len(other.submits)) == (1, 5), (
            "where all are, requests wait there"
        )
        one.paused = False
        await served.until_states("ready", "paused")


async def test_a_draining_engine_gets_nothing_new_and_finishes_its_own(tmp_path: Path) -> None:
    async with fleet(tmp_path, 2, hold_after=2) as served, served.http() as client:
        first, second = served.engines.values()
        running = [asyncio.create_task(ask(client)) for _ in range(2)]
        await until(lambda: first.live == second.live == 1)
        await first.say(pb.SessionResponse(draining=pb.Draining(deadline_ms=9000)))
        await served.until_states("draining", "ready")
        second.hold_after = None
        for _ in range(3):
            assert (await ask(client)).status_code == 200
        assert len(first.submits) == 1
        first.hold_after = None
        assert [one.status_code for one in await asyncio.gather(*running)] == [200, 200]
        assert served.desk.state == "ready"


async def test_the_same_model_or_none(tmp_path: Path) -> None:
    """An engine with another model is not used, and says why; the same engine counts once."""
    async with AsyncExitStack() as opened:
        engines = [make_engine(tmp_path, instance_id=name)[0] for name in ("a", "b", "a")]
        ports = [await opened.enter_async_context(serving(one)) for one in engines[:1]]
        later = [free_port(), free_port()]
        addresses = ",".join(f"127.0.0.1:{port}" for port in (*ports, *later))
        config = FrontendConfig(engine=addresses, http_port=0, grpc_port=0)
        frontend = await FrontendServer.start(config)
        opened.push_async_callback(frontend.stop)
        served = Fleet(frontend, dict(zip((*ports, *later), engines, strict=True)))
        await until(lambda: len(served.desk.fleet.told()) == 3)
        await served.until_states("ready", "connecting", "connecting")
        engines[1].model_id = "other"
        for port, engine in zip(later, engines[1:], strict=True):
            await opened.enter_async_context(serving(engine, port))
        await until(lambda: "its model is 'other'" in served.desk.fleet.last_error)
        await until(lambda: "the same engine as" in served.desk.fleet.last_error)
        async with served.http() as client:
            for _ in range(3):
                assert (await ask(client)).status_code == 200
            health = (await client.get("/health")).json()
            assert "its model is 'other'" in str(health["engines"])
            assert (health["status"], health["state"]) == ("degraded", "ready")
            assert health["reasons"] == ["2 of 3 engines take no requests"]
        assert not engines[1].submits
        engines[1].model_id = "fake"
        await served.until_states("ready", "ready", "connecting")


async def test_a_full_queue_goes_elsewhere_once_and_full_ones_shed_before_work(
    tmp_path: Path,
) -> None:
    limits = pb.EngineLimits(max_rows=1, max_queued_requests=1)
    flags = {"routing": "round_robin"}
    async with fleet(tmp_path, flags=flags, limits=limits, waiting=0) as served:
        engines = list(served.engines.values())
        engines[0].refuse = Overloaded("1 request is waiting")
        async with served.http() as client:
            for _ in range(3):
                assert (await ask(client)).status_code == 200
            assert len(engines[0].submits) in (1, 2), "turns go by address, and a retry is one"
            engines[1].hold = engines[2].hold = True
            held = asyncio.create_task(ask(client))
            await until(lambda: sum(one.live for one in engines) == 1)  # where it stays
            for engine in engines:
                engine.waiting = 1
            await until(lambda: served.desk.fleet.load.waiting == 3)
            before = sum(len(one.submits) for one in engines)
            answer = await ask(client)
            assert answer.status_code == 429
            assert answer.headers["retry-after"] == "1"
            assert "3 requests are waiting in 3 engines, the limit is 3" in answer.text
            assert sum(len(one.submits) for one in engines) == before
            engines[0].refuse = None
            urgent = asyncio.create_task(ask(client, priority=1))
            await until(lambda: sum(len(one.submits) for one in engines) == before + 1)
            engines[1].hold = engines[2].hold = False
            for one in await asyncio.gather(held, urgent):
                assert one.status_code == 200, "the engine decides about what is urgent"
            answer = await ask(client)
            assert answer.status_code == 200, "and about who has nothing there yet"
            engines[0].hold = engines[1].hold = engines[2].hold = True
            held = asyncio.create_task(ask(client))
            await until(lambda: sum(one.live for one in engines) == 1)
            engines[2].waiting = 0
            await until(lambda: served.desk.fleet.load.waiting == 2)
            engines[2].hold = False
            assert (await ask(client)).status_code == 200, "control: one has room"
            engines[0].hold = engines[1].hold = False
            assert (await held).status_code == 200


@pytest.mark.parametrize("how", ["header", "prompt_cache_key", "user", "nothing"])
async def test_sessions_stay_on_their_engine(tmp_path: Path, how: str) -> None:
    async with fleet(tmp_path, flags={"routing": "session_affinity"}) as served:
        async with served.http() as client:
            for number in range(24):
                name = f"session {number % 4}"
                given: dict[str, Any] = {how: name} if how in ("prompt_cache_key", "user") else {}
                headers = {"x-session-id": name} if how == "header" else {}
                answer = await ask(client, prompt=name, headers=headers, **given)
                assert answer.status_code == 200
        places: dict[bytes, set[str]] = {}
        for engine in served.engines.values():
            for spec in engine.submits:
                places.setdefault(spec.prompt_token_ids, set()).add(engine.instance_id)
        sizes = {len(found) for found in places.values()}
        assert sizes == {1} if how != "nothing" else sizes != {1}


async def test_engines_join_and_leave_by_discovery(tmp_path: Path) -> None:
    """Found by a name; one that is not named any more finishes what it has."""
    async with fleet(tmp_path, 2, hold_after=2) as served, served.http() as client:
        first, second = served.engines.values()
        running = [asyncio.create_task(ask(client)) for _ in range(2)]
        await until(lambda: first.live == second.live == 1)
        places = [f"127.0.0.1:{port}" for port in served.engines]
        served.desk.fleet.take(frozenset(places[1:]))
        await served.until_states("leaving", "ready")
        second.hold_after = None
        for _ in range(3):
            assert (await ask(client)).status_code == 200
        assert len(first.submits) == 1
        first.hold_after = None
        assert [one.status_code for one in await asyncio.gather(*running)] == [200, 200]
        await until(lambda: len(served.desk.fleet.told()) == 1)
        served.desk.fleet.take(frozenset(places))
        await until(lambda: len(served.desk.fleet.told()) == 2)
        await served.until_states("ready", "ready")
