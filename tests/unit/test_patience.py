"""How long a drain waits, and what may be said of it before, meanwhile and behind."""

from __future__ import annotations

import asyncio

import pytest

from engine_service.server.patience import Patience


@pytest.mark.parametrize(("only_less", "seconds"), [(False, 5.0), (True, 3.0)])
def test_before_it_waits_the_first_says_how_long(only_less: bool, seconds: float) -> None:
    patience = Patience(3.0)
    patience.allow(5.0, only_less=only_less)
    assert patience.seconds == seconds


async def test_while_it_waits_it_can_get_shorter_alone() -> None:
    patience = Patience(30.0)
    waiting = asyncio.create_task(patience.wait(asyncio.sleep(30)))
    await asyncio.sleep(0)
    patience.allow(60.0, only_less=False)
    assert patience.seconds == 30
    patience.allow(0.01, only_less=True)
    assert not await waiting
    assert patience.seconds < 5


@pytest.mark.parametrize("takes", [0.0, 30.0])
async def test_behind_its_end_nothing_changes(takes: float) -> None:
    patience = Patience(0.05)
    assert await patience.wait(asyncio.sleep(takes)) == (takes == 0)
    patience.allow(0.01, only_less=True)
    assert patience.seconds == 0.05
