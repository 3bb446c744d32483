"""Engines that come in at the same time, of which some are slow to send their tokenizer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from frontend.app import FrontendServer
from frontend.config import FrontendConfig
from tests.service.fake_engine import FakeEngine, serving
from tests.service.frontends import make_engine
from tests.service.test_fleet import Fleet, ask
from tests.waiting import free_port, until


@asynccontextmanager
async def coming(folder: Path, *engines: FakeEngine) -> AsyncIterator[Fleet]:
    """A frontend whose engines come up one after the other, each once the one before it has been
    asked for its tokenizer."""
    async with AsyncExitStack() as opened:
        served = {free_port(): engine for engine in engines}
        addresses = ",".join(f"127.0.0.1:{port}" for port in served)
        config = FrontendConfig(engine=addresses, http_port=0, grpc_port=0)
        frontend = await FrontendServer.start(config)
        opened.push_async_callback(frontend.stop)
        for port, engine in served.items():
            await opened.enter_async_context(serving(engine, port))
            await until(lambda one=engine: one.num_fetching or not one.hold_tokenizer)
        yield Fleet(frontend, served)


async def test_an_engine_that_is_slow_to_send_its_tokenizer_holds_up_nobody(
    tmp_path: Path,
) -> None:
    """Not even itself, once another one has sent the same."""
    slow, fast = (make_engine(tmp_path, instance_id=name)[0] for name in "ab")
    slow.hold_tokenizer = True
    async with coming(tmp_path, slow, fast) as served, served.http() as client:
        await served.until_states("ready", "ready")
        assert (await ask(client)).status_code == 200
        await until(lambda: not slow.num_fetching)


async def test_of_two_models_that_come_at_once_one_is_served(tmp_path: Path) -> None:
    first, second = (make_engine(tmp_path / name, instance_id=name)[0] for name in "ab")
    second.model_id = "other"
    (tmp_path / "b" / "tokenizer" / "merges.txt").write_text("of another model")
    first.hold_tokenizer = second.hold_tokenizer = True
    async with coming(tmp_path, first, second) as served, served.http() as client:
        assert served.states() == ["connecting"] * 2
        first.hold_tokenizer = second.hold_tokenizer = False
        fleet = served.desk.fleet
        await until(lambda: fleet.state == "ready" and "engines behind one" in fleet.last_error)
        assert sorted(served.states()) == ["connecting", "ready"]
        (model,) = (await client.get("/v1/models")).json()["data"]
        place = served.states().index("ready")
        assert model["id"] == ("fake", "other")[place], "the model is that of the engine"
        assert (await ask(client)).status_code == 200
        assert [len(one.submits) for one in (first, second)] == [1 - place, place]


async def test_one_engine_under_two_addresses_comes_in_once(tmp_path: Path) -> None:
    both = [make_engine(tmp_path, instance_id="same")[0] for _ in range(2)]
    for one in both:
        one.hold_tokenizer = True
    async with coming(tmp_path, *both) as served:
        for one in both:
            one.hold_tokenizer = False
        fleet = served.desk.fleet
        await until(lambda: fleet.state == "ready" and "the same engine as" in fleet.last_error)
        assert sorted(served.states()) == ["connecting", "ready"]


async def test_an_engine_that_leaves_while_it_is_waited_for(tmp_path: Path) -> None:
    slow, fast = (make_engine(tmp_path, instance_id=name)[0] for name in "ab")
    slow.hold_tokenizer = fast.hold_tokenizer = True
    async with coming(tmp_path, slow, fast) as served, served.http() as client:
        fleet, (_, stays) = served.desk.fleet, served.engines
        fleet.take(frozenset({f"127.0.0.1:{stays}"}))
        await until(lambda: len(fleet.members) == 1 and not slow.num_fetching)
        fast.hold_tokenizer = False
        await until(lambda: fleet.state == "ready")
        assert (await ask(client)).status_code == 200
        assert not [one for one in asyncio.all_tasks() if one.get_name().startswith("closing")]
