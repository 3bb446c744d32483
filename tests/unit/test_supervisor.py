"""How long `tidemill serve` gives its services to end before it kills them, and which engines it
starts again how often."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from engine_service.config import EngineConfig
from frontend.config import FrontendConfig
from tests.waiting import PATIENCE_S
from tidemill.commands import engine_state, keeper
from tidemill.commands.child import Child
from tidemill.commands.engine_group import EnginePlan
from tidemill.commands.keeper import Keeper, environ_without
from tidemill.commands.screen import Screen
from tidemill.commands.supervisor import Supervisor


class Ending:
    """A service that only notes how long it would have had."""

    def __init__(self) -> None:
        self.given: list[float] = []

    async def stop(self, seconds: float) -> None:
        self.given.append(seconds)


@pytest.mark.parametrize("pause", [0.0, 60.0])
async def test_a_service_may_pause_and_drain_before_it_is_killed(
    monkeypatch: pytest.MonkeyPatch, pause: float
) -> None:
    service = Ending()
    flags = {"drain_pause_s": pause, "drain_timeout_s": 30.0}
    plan = EnginePlan(EngineConfig(model="demo", **flags), {})
    supervisor = Supervisor("serve", [plan], FrontendConfig(**flags))
    supervisor._keepers = []

    async def start(*_: Any) -> None:
        supervisor._front = service  # type: ignore[assignment]

    async def watch() -> int:
        return 0

    monkeypatch.setattr(supervisor, "_start_frontend", start)
    monkeypatch.setattr(supervisor, "_watch", watch)
    assert await supervisor.run() == 0
    (given,) = service.given
    assert pause + 30 + 4.5 < given <= pause + 60, "and what both need to close down"


def test_a_service_that_has_just_ended_can_be_killed_all_the_same() -> None:
    """Between its end and the turn of the event loop that tells of it there is no such group."""
    ended = subprocess.Popen(["true"], start_new_session=True)
    ended.wait()
    ended.returncode = None
    Child("engine_service", ended, None).kill()  # type: ignore[arg-type]
    ended.returncode = 0


class Told(Screen):
    """Hears what a keeper would tell, and the pauses of an engine that fails."""

    def __init__(self) -> None:
        super().__init__("tidemill serve", ["engine"])
        self.pauses: list[float] = []

    def restarts(self, name: str, how: str, pause_s: float) -> None:
        self.pauses.append(pause_s)


NOW_S = 1000.0
"""By the clock of a keeper that stands still: having served counts from a few milliseconds on
here, which a process that just does not get its turn would reach as well."""


class Failing(Keeper):
    """An engine whose process ends at once, as often as `served` says how long it had served
    (None: it never did); its starts cost no process."""

    def __init__(self, screen: Screen, served: list[float | None], **how: Any) -> None:
        plan = EnginePlan(EngineConfig(), {})
        super().__init__(plan, screen, name="engine", labels={}, **how)
        self.left = served

    async def start(self) -> None:
        self._began = 0.0

    async def _run_once(self) -> str:
        served = self.left.pop(0)
        self._served_since = None if served is None else NOW_S - served
        if served is not None:
            self.is_ready.set()
        return "ended"


async def pauses(monkeypatch: pytest.MonkeyPatch, served: list[float | None]) -> list[float]:
    """Of an engine that others outlive for as long as `served` has entries."""
    screen = Told()
    monkeypatch.setattr(keeper, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(keeper, "LONGEST_PAUSE_S", 0.008)
    monkeypatch.setattr(keeper, "time", SimpleNamespace(monotonic=lambda: NOW_S))
    failing = Failing(screen, served, may_return=lambda: bool(served))
    assert await failing.keep() == "ended"
    return [round(1000 * pause) for pause in screen.pauses]


async def test_an_engine_that_keeps_failing_is_started_ever_more_rarely(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = await pauses(monkeypatch, [0.0, None, None, None, None, None])
    assert found == [1, 2, 4, 8, 8]


async def test_one_that_fails_for_days_is_started_again_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(keeper.asyncio, "sleep", _at_once)
    found = await pauses(monkeypatch, [0.0, *[None] * 1100])
    assert found[-1] == 8
    assert len(found) == 1100


async def _at_once(_: float) -> None:
    """A pause that takes no time."""


async def test_one_that_has_served_for_long_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await pauses(monkeypatch, [0.0, 0.0, 9.0, 0.0]) == [1, 2, 1]


async def test_one_that_never_served_is_not_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[float | None] = [None, 0.0]
    assert await pauses(monkeypatch, left) == []
    assert left == [0.0]


async def test_an_engine_that_is_too_busy_to_answer_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    late = grpc.aio.Metadata()
    answers: list[Any] = [
        grpc.aio.AioRpcError(grpc.StatusCode.DEADLINE_EXCEEDED, late, late),
        "what it serves",
    ]

    async def stages(_: str) -> AsyncIterator[str]:
        for stage in ():
            yield stage

    async def serving(_: str) -> Any:
        if isinstance(answer := answers.pop(0), Exception):
            raise answer
        return answer

    monkeypatch.setattr(keeper, "stages", stages)
    monkeypatch.setattr(keeper, "serving", serving)
    monkeypatch.setattr(keeper, "_PROBE_EVERY_S", 0.001)
    one = Keeper(
        EnginePlan(EngineConfig(), {}), Told(), name="engine", labels={}, may_return=lambda: True
    )
    await one._become_ready()
    assert one.is_ready.is_set()
    assert one.facts == "what it serves"


async def test_a_health_page_that_says_nothing_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_state, "_ANSWER_S", 0.2)
    asked: list[asyncio.StreamWriter] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(writer)
        await reader.readuntil(b"\r\n\r\n")
        if len(asked) > 1:
            writer.write(b'HTTP/1.1 200 OK\r\n\r\n{"status":"healthy"}')
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        await asyncio.wait_for(engine_state.healthy("127.0.0.1", port, 0.001), PATIENCE_S)
        for writer in asked:
            writer.close()
    assert len(asked) >= 2  # more of them when an answer is late


def test_services_read_no_file_of_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has flags of both services in it, and those of this one are told as flags."""
    monkeypatch.setenv("TIDEMILL_CONFIG", "both.yaml")
    monkeypatch.setenv("TIDEMILL_SEED", "1")
    monkeypatch.setenv("TIDEMILL_API_KEY", "secret")
    found = environ_without(EngineConfig())
    assert not {"TIDEMILL_CONFIG", "TIDEMILL_SEED"} & found.keys()
    assert found["TIDEMILL_API_KEY"] == "secret"
