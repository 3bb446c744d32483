"""What an event loop has to do, for metrics. It does not know what its tasks are."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tidemill.telemetry.families import PREFIX

_DOC = "Tasks of the event loop: streams, calls and what runs beside them. It falls back when idle."


class EventLoopTasks(Collector):
    """For a registry; `collect` may be called from any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def collect(self) -> Iterator[Metric]:
        """What a registry asks for. O(tasks)."""
        family = GaugeMetricFamily(PREFIX + "event_loop_tasks", _DOC)
        family.add_metric([], float(len(asyncio.all_tasks(self._loop))))
        yield family
