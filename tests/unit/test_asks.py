"""What becomes of answers, whoever still waits for them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from engine_service.core.control import Answer, Ask
from engine_service.core.handoff import BeginTransfer, Begun, EndTransfer, end_of
from engine_service.server.asks import Asks
from tidemill.runtime.errors import EngineDead, FailedPrecondition

BEGIN = BeginTransfer(b"", "", "", True)
BEGUN = Begun(7, 16, 0, 64, 16)


async def begin(asks: Asks) -> asyncio.Task[Any]:
    task = asyncio.create_task(asks.ask(BEGIN, undo=end_of))
    await asyncio.sleep(0)
    return task


@pytest.mark.parametrize("moment", ["after", "at once", "before"])
async def test_what_nobody_waits_for_is_undone(moment: str) -> None:
    """Whoever asked is gone before the answer comes, as it comes, or just behind it."""
    sent: list[Ask] = []
    asks = Asks(sent.append)
    task = await begin(asks)
    if moment == "before":
        asks.settle(Answer(sent[0].ticket, BEGUN))
    task.cancel()
    if moment == "after":
        await asyncio.sleep(0)
    if moment != "before":
        asks.settle(Answer(sent[0].ticket, BEGUN))
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [one.control for one in sent] == [BEGIN, EndTransfer(7)]
    asks.settle(Answer(sent[1].ticket))
    assert not asks._open


async def test_what_is_waited_for_or_was_refused_is_not_undone() -> None:
    sent: list[Ask] = []
    asks = Asks(sent.append)
    task = await begin(asks)
    asks.settle(Answer(sent[0].ticket, BEGUN))
    assert await task == BEGUN
    refusal = FailedPrecondition("no", reason="NO")
    for is_gone in (False, True):
        task = await begin(asks)
        if is_gone:
            task.cancel()
            await asyncio.sleep(0)
        asks.settle(Answer(sent[-1].ticket, error=refusal))
        with pytest.raises(asyncio.CancelledError if is_gone else FailedPrecondition):
            await task
    gone = await begin(asks)
    gone.cancel()
    waiting = await begin(asks)
    asks.fail_all(EngineDead("gone"))
    with pytest.raises(EngineDead):
        await waiting
    assert [one.control for one in sent] == [BEGIN] * 5
    assert not asks._open


async def test_a_core_that_is_gone_leaves_nothing() -> None:
    def dead(ask: Ask) -> None:
        raise EngineDead("gone")

    asks = Asks(dead)
    with pytest.raises(EngineDead):
        await asks.ask(BEGIN, undo=end_of)
    asks.post(EndTransfer(1))
    assert not asks._open
