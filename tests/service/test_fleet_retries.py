"""What goes to another engine, what does not, and what an engine is blamed for."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.service.fake_engine import FakeEngine, serving
from tests.service.frontends import make_engine
from tests.service.test_fleet import BODY, ask, fleet
from tests.waiting import PATIENCE_S, until
from tidemill.runtime.errors import Unavailable
from tidemill.v1 import engine_pb2 as pb

EMBED = {"model": "fake", "input": "ab"}


async def test_many_requests_lost_with_their_session_are_one_loss(tmp_path: Path) -> None:
    """The first loss may be the network's: the engine is used again as soon as it is back."""
    async with fleet(tmp_path, 2, hold_after=2) as served, served.http() as client:
        first, second = served.engines.values()
        asked = [asyncio.create_task(ask(client)) for _ in range(24)]
        await until(lambda: first.sent + second.sent == 48)
        assert first.live >= 10
        second.hold_after = None
        first.drop_sessions()
        codes = [one.status_code for one in await asyncio.gather(*asked)]
        assert codes.count(503) >= 10, "control: they had begun there"
        assert [one["ejections"] for one in served.desk.fleet.told()] == [0, 0]
        await served.until_states("ready", "ready")


async def test_a_prompt_that_kills_is_pooled_by_two_engines_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC may say that the call is cut before the session notices that the process has died."""

    async def dies(engine: FakeEngine, request: Any, context: Any) -> None:
        engine.pools.append(request)
        engine.instance_id += "'"
        engine.drop_sessions()
        await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")

    monkeypatch.setattr(FakeEngine, "Pool", dies)
    monkeypatch.setattr("frontend.engine_pool._NOTICE_S", PATIENCE_S)
    async with fleet(tmp_path, 5) as served, served.http() as client:
        answer = await client.post("/v1/embeddings", json=EMBED)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_dead")
        assert sum(len(one.pools) for one in served.engines.values()) == 2


async def test_a_prompt_of_an_engine_that_fell_silent_is_pooled_by_another_one(
    tmp_path: Path,
) -> None:
    """The channel is closed then, which cancels the call: nobody who asked has gone away."""
    flags = {"engine_silence_s": 1.0}
    async with fleet(tmp_path, 2, flags=flags, hold=True) as served, served.http() as client:
        engines = list(served.engines.values())
        asked = asyncio.create_task(client.post("/v1/embeddings", json=EMBED))
        await until(lambda: any(one.pools for one in engines))
        silent, other = sorted(engines, key=lambda one: not one.pools)
        other.hold = False
        for writer in silent.sessions:
            writer.is_mute = True
        answer = await asked
        assert answer.status_code == 200, answer.text
        assert len(other.pools) == 1


async def test_a_client_that_leaves_says_nothing_of_the_engine(tmp_path: Path) -> None:
    """Neither that it is well, which would forgive what others have suffered there."""
    async with fleet(tmp_path, 1, hold=True) as served, served.http() as client:
        (engine,), (member,) = served.engines.values(), served.desk.fleet.members
        heard: list[str] = []
        member.outlier.succeeded = lambda: heard.append("succeeded")  # type: ignore[method-assign]
        member.outlier.failed = lambda now: heard.append("failed")  # type: ignore[method-assign]
        asked = asyncio.create_task(client.post("/v1/embeddings", json=EMBED))
        await until(lambda: engine.live == 1)
        asked.cancel()
        await until(lambda: engine.live == served.desk.num_live == 0)
        assert heard == []
        engine.hold = False
        assert (await client.post("/v1/embeddings", json=EMBED)).status_code == 200
        assert heard == ["succeeded"], "control: an answer does"


async def test_pooled_prompts_count_before_a_report(tmp_path: Path) -> None:
    limits = pb.EngineLimits(max_rows=64)
    async with fleet(tmp_path, 2, limits=limits, waiting=0) as served, served.http() as client:
        first, second = served.engines.values()
        second.waiting = 1
        await until(lambda: served.desk.fleet.load.waiting == 1)
        first.hold = second.hold = True
        body = {"model": "fake", "input": ["ab"] * 8}
        asked = asyncio.create_task(client.post("/v1/embeddings", json=body))
        await until(lambda: len(first.pools) + len(second.pools) == 8)
        first.hold = second.hold = False
        assert (await asked).status_code == 200
        assert min(len(first.pools), len(second.pools)) >= 2


async def test_an_engine_that_does_not_read_is_passed_over(tmp_path: Path) -> None:
    async with fleet(tmp_path, 2, flags={"routing": "round_robin"}) as served:
        outboxes = [one.client._slots.outbox for one in served.desk.fleet.members]
        async with served.http() as client:
            outboxes[0]._num_bytes += 1 << 40
            codes = [(await ask(client)).status_code for _ in range(4)]
            assert codes == [200] * 4
            assert sorted(len(one.submits) for one in served.engines.values()) == [0, 4]
            outboxes[1]._num_bytes += 1 << 40
            answer = await ask(client)
            assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
            assert "does not read" in answer.text


async def test_a_prefill_engine_is_named_to_decode_engines_alone(tmp_path: Path) -> None:
    """Where a decode engine does not read, the request goes on to one that computes its prompts."""
    async with fleet(tmp_path, 3, flags={"routing": "round_robin"}) as served:
        for one, role in zip(served.desk.fleet.members, ("decode", "both", "prefill"), strict=True):
            assert one.client.facts is not None
            one.client.facts = replace(one.client.facts, role=role)
        by_role = {one.role: one.client for one in served.desk.fleet.members}
        async with served.http() as client:
            assert [(await ask(client)).status_code for _ in range(3)] == [200] * 3
            engine = served.engines[port(by_role["prefill"])]
            engine.paused = True
            await until(lambda: "paused" in served.states())
            seen = [len(one.submits) for one in served.engines.values()]
            assert [(await ask(client)).status_code for _ in range(2)] == [200] * 2
            news = zip(served.engines.values(), seen, strict=True)
            late = [spec.kv_source.address for one, old in news for spec in one.submits[old:]]
            assert late == ["", ""], "who waited for it would compute the prompt itself, only later"
            engine.paused = False
            await until(lambda: "paused" not in served.states())
            by_role["decode"]._slots.outbox._num_bytes += 1 << 40
            assert [(await ask(client)).status_code for _ in range(3)] == [200] * 3
        told = {
            role: {spec.kv_source.address for spec in served.engines[port(one)].submits}
            for role, one in by_role.items()
        }
        address = by_role["prefill"].address
        assert told == {"decode": {address, ""}, "both": {""}, "prefill": set()}


async def test_engines_of_either_role_take_turns(tmp_path: Path) -> None:
    flags = {"routing": "round_robin"}
    async with fleet(tmp_path, 4, flags=flags) as served, served.http() as client:
        members = served.desk.fleet.members
        for one, role in zip(members, ("decode", "decode", "prefill", "prefill"), strict=True):
            assert one.client.facts is not None
            one.client.facts = replace(one.client.facts, role=role)
        for _ in range(8):
            assert (await ask(client)).status_code == 200
        assert [one.num_routed for one in members] == [4] * 4


async def test_picks_of_prefill_engines_count_before_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A burst is shared by them, whatever was true when they last said how they are loaded."""
    monkeypatch.setattr("frontend.fleet.prefill_picks.ON_THE_WAY_S", math.inf)
    limits = pb.EngineLimits(max_rows=64)
    async with fleet(tmp_path, 3, limits=limits, waiting=0) as served, served.http() as client:
        members = served.desk.fleet.members
        decode, idle, busy = members
        for one, role in zip(members, ("decode", "prefill", "prefill"), strict=True):
            assert one.client.facts is not None
            one.client.facts = replace(one.client.facts, role=role)
        served.engines[port(busy.client)].waiting = 2
        await until(lambda: busy.client.load.waiting == 2)
        engine = served.engines[port(decode.client)]
        engine.hold = True
        asked = [asyncio.create_task(ask(client)) for _ in range(16)]
        await until(lambda: len(engine.submits) == 16)
        told = Counter(spec.kv_source.address for spec in engine.submits)
        assert told == {idle.client.address: 9, busy.client.address: 7}
        assert [one.view().outstanding for one in (idle, busy)] == [9, 9]
        engine.hold = False
        assert {(await one).status_code for one in asked} == {200}
        assert [one.view().sent for one in (idle, busy)] == [0, 0]


@pytest.mark.parametrize("path", ["completions", "embeddings"])
async def test_what_waits_is_not_sent_to_an_engine_of_another_model(
    tmp_path: Path, path: str
) -> None:
    """One that waited beside ours comes in when the last of ours is lost. It would have answered,
    under the name that was asked for, token ids that it reads as another text."""
    async with fleet(tmp_path, 1, hold=True) as served, served.http() as client:
        (ours,), in_all = served.engines.values(), served.desk.fleet
        other, _ = make_engine(tmp_path, instance_id="other")
        other.model_id = "other"
        async with serving(other) as port_of_other:
            address = f"127.0.0.1:{port_of_other}"
            in_all.take(frozenset({address, *(one.client.address for one in in_all.members)}))
            await until(lambda: "its model is 'other'" in in_all.last_error)
            given = {"input": "ab"} if path == "embeddings" else BODY
            asked = asyncio.create_task(client.post(f"/v1/{path}", json={"model": "fake", **given}))
            await until(lambda: ours.live == 1)
            in_all.take(frozenset({address}))
            ours.drop_sessions()
            answer = await asked
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_dead")
            assert [*other.submits, *other.pools] == []
            await until(lambda: in_all.state == "ready")
            answer = await client.post(f"/v1/{path}", json={"model": "other", **given})
            assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("path", ["completions", "embeddings"])
async def test_nobody_waits_for_an_engine_beyond_his_deadline(
    tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last one is lost: two seconds for it to come back were added to any deadline."""
    monkeypatch.setattr("frontend.fleet.route._WAIT_S", 3 * PATIENCE_S)
    async with fleet(tmp_path, 1, hold=True) as served, served.http() as client:
        (ours,) = served.engines.values()
        given = {"input": "ab"} if path == "embeddings" else BODY
        in_time = {"x-request-timeout-ms": "1000"}
        asked = asyncio.create_task(client.post(f"/v1/{path}", json=given, headers=in_time))
        await until(lambda: ours.live == 1)
        served.desk.fleet.take(frozenset())  # it does not come back
        ours.drop_sessions()
        answer = await asyncio.wait_for(asked, PATIENCE_S)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_dead")


def port(client: Any) -> int:
    return int(client.address.rpartition(":")[2])


async def test_a_search_begins_again_where_a_round_of_it_is_refused(tmp_path: Path) -> None:
    """Of a search that is not done nobody has heard anything."""
    async with fleet(tmp_path, 2, hold=True) as served, served.http() as client:
        engines = list(served.engines.values())
        search = {"use_beam_search": True, "n": 2, "best_of": 2, "max_tokens": 3}
        asked = asyncio.create_task(ask(client, **search))
        await until(lambda: any(one.live for one in engines))
        (place,) = [number for number, one in enumerate(engines) if one.live]
        engines[place].refuse = Unavailable("the engine is draining", reason="DRAINING")
        for one in engines:
            one.hold = False
        moved = await asked
        assert moved.status_code == 200, moved.text
        assert len(engines[place].submits) > 1, "control: a later round was refused"
        engines[place].refuse = None
        again = await ask(client, **search)
        texts = [[choice["text"] for choice in one.json()["choices"]] for one in (moved, again)]
        assert texts[0] == texts[1]
