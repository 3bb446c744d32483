"""Running stacks that tests share, and connections to them that are checked after each test."""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from functools import cache

import pytest

from tests.e2e.real_stack import Faces, Stack, connected, good, serving, settled, until_idle


@pytest.fixture(scope="session")
def stack_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Stack]]:
    """The one stack of a test process that serves a built-in model, started when first asked for.
    Whoever has it leaves it as it was."""
    with ExitStack() as closing:

        @cache
        def started(model: str) -> Stack:
            return closing.enter_context(serving(tmp_path_factory.mktemp("stack"), model))

        yield started


@pytest.fixture(scope="session")
def stack(stack_of: Callable[[str], Stack]) -> Stack:
    return stack_of("demo")


@pytest.fixture
async def faces(stack: Stack) -> AsyncIterator[Faces]:
    """Checks after the test that all connections still serve and that nothing is left over."""
    async with settled(stack), connected(stack) as opened:
        yield opened
        await good(opened)
        await until_idle(opened)
