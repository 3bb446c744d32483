"""The gauge that says how much an event loop has to do."""

from __future__ import annotations

import asyncio

from tidemill.telemetry.event_loop import EventLoopTasks


def told(tasks: EventLoopTasks) -> float:
    """As a scrape sees it."""
    (family,) = tasks.collect()
    (sample,) = family.samples
    assert sample.name == "tidemill_event_loop_tasks"
    return float(sample.value)


async def test_tasks_are_counted_from_any_thread_until_they_end() -> None:
    tasks, gate = EventLoopTasks(asyncio.get_running_loop()), asyncio.Event()
    before = await asyncio.to_thread(told, tasks)
    waiting = [asyncio.create_task(gate.wait()) for _ in range(7)]
    assert await asyncio.to_thread(told, tasks) == before + 7
    gate.set()
    await asyncio.gather(*waiting)
    assert await asyncio.to_thread(told, tasks) == before
