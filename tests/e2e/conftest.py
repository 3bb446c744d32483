"""One running stack per test process, and connections to it that are checked after each test."""

from collections.abc import AsyncIterator, Iterator

import pytest

from tests.e2e.real_stack import (
    Faces,
    Stack,
    connected,
    engine,
    free_port,
    frontend,
    good,
    settled,
    until_idle,
)


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder, port = tmp_path_factory.mktemp("stack"), free_port()
    with engine(folder, port, "demo") as served, frontend(folder, port) as running:
        running.wait_ready()
        running.services |= {"engine": served.pid, "rank": served.rank_pid}
        yield running


@pytest.fixture
async def faces(stack: Stack) -> AsyncIterator[Faces]:
    """Checks after the test that all connections still serve and that nothing is left over."""
    async with settled(stack), connected(stack) as opened:
        yield opened
        await good(opened)
        await until_idle(opened)
