"""grpc.health.v1 as both services serve it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.waiting import PATIENCE_S, until
from tidemill.runtime.health import Health

NAMES = ("", "liveness", "readiness")
SERVING, NOT_SERVING, UNKNOWN = 1, 2, 3


class Served(NamedTuple):
    health: Health
    stub: Any


def ask(name: str) -> health_pb2.HealthCheckRequest:
    return health_pb2.HealthCheckRequest(service=name)


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    server = grpc.aio.server()
    health = Health(NAMES)
    await health.register(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield Served(health, health_pb2_grpc.HealthStub(channel))
    await server.stop(None)


async def test_nothing_is_healthy_before_its_owner_says_so(served: Served) -> None:
    for name in NAMES:
        assert (await served.stub.Check(ask(name))).status == NOT_SERVING
    served.health.tell("liveness", True)
    await until(lambda: not served.health._telling)
    assert (await served.stub.Check(ask("liveness"))).status == SERVING
    assert (await served.stub.Check(ask(""))).status == NOT_SERVING


async def test_list_names_every_service(served: Served) -> None:
    served.health.tell("readiness", True)
    answer = await served.stub.List(health_pb2.HealthListRequest())
    found = {name: one.status for name, one in answer.statuses.items()}
    assert found == {"": NOT_SERVING, "liveness": NOT_SERVING, "readiness": SERVING}


async def test_unknown_services(served: Served) -> None:
    """Check refuses; Watch waits, because the service may come."""
    assert await served.stub.Check(ask("nobody")).code() is grpc.StatusCode.NOT_FOUND
    watch = served.stub.Watch(ask("nobody"))
    assert (await watch.read()).status == UNKNOWN
    watch.cancel()


async def test_a_watch_lasts_and_ends_on_the_last_status(served: Served) -> None:
    watch = served.stub.Watch(ask("readiness"))
    assert (await watch.read()).status == NOT_SERVING
    for serving, status in ((True, SERVING), (False, NOT_SERVING)):
        served.health.tell("readiness", serving)
        assert (await watch.read()).status == status
    for serving in (True, False, True, False, True):
        served.health.tell("readiness", serving)
    async with asyncio.timeout(PATIENCE_S):
        while (await watch.read()).status != SERVING:
            pass
    await until(lambda: not served.health._telling)
    assert (await served.stub.Check(ask("readiness"))).status == SERVING
    watch.cancel()


async def test_a_watcher_that_does_not_read_holds_nobody_up(served: Served) -> None:
    slow = served.stub.Watch(ask("readiness"))
    for turn in range(200):
        served.health.tell("readiness", turn % 2 == 0)
        served.health.tell("liveness", turn % 2 == 0)
    served.health.tell("liveness", True)
    async with asyncio.timeout(PATIENCE_S):
        while (await served.stub.Check(ask("liveness"))).status != SERVING:
            pass
    slow.cancel()
