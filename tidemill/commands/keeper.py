"""Keeps one engine running: starts it, knows when it serves, and starts it again when it has ended
while others serve. It does not know who the others are, nor the frontend.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping

import grpc

from tidemill.commands.child import Child
from tidemill.commands.engine_group import EnginePlan
from tidemill.commands.engine_state import Serving, probed, serving, stages
from tidemill.commands.ports import reachable
from tidemill.commands.screen import Screen
from tidemill.runtime import options
from tidemill.runtime.endings import ending
from tidemill.runtime.errors import EngineDead

MODULE = "engine_service"
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Before the first new start, and before each one of an engine that keeps failing: twice the one
before. Who has served for the longer of them begins anew."""
_MOST_DOUBLINGS = 16
"""More than lead to the longest pause; without an end the power outgrows a float within a day."""
_PROBE_EVERY_S = 0.5


class Keeper:
    """One engine of a group. `is_ready` is set when it serves for the first time, and `facts` then
    say what, unless it speaks TLS: whoever asks might need a certificate.

    `may_return` answers whether it is worth starting again.
    """

    def __init__(
        self,
        plan: EnginePlan,
        screen: Screen,
        *,
        name: str,
        labels: Mapping[str, str],
        may_return: Callable[[], bool],
    ) -> None:
        """`name` and `labels` are for the screen."""
        self.plan = plan
        self.name = name
        self._labels = labels
        self.facts: Serving | None = None
        self.is_ready = asyncio.Event()
        self._screen = screen
        self._may_return = may_return
        self._child: Child | None = None
        self._num_failures = 0
        self._began = 0.0
        self._served_since: float | None = None

    @property
    def is_running(self) -> bool:
        """Whether there is a process; it may be loading."""
        return self._child is not None and self._child.is_running

    async def start(self) -> None:
        """The process, without waiting for more."""
        self._began, self._served_since = time.monotonic(), None
        self._child = await Child.start(
            MODULE,
            arguments(self.plan.config),
            environ=environ_without(self.plan.config) | dict(self.plan.environ),
            on_line=lambda line: self._screen.line(self.name, line, self._labels),
        )

    async def keep(self) -> str:
        """Until it has ended for good; returns how. An engine that has never served is not started
        again: whatever is wrong with it, somebody has to change."""
        while True:
            how = await self._run_once()
            if not self.is_ready.is_set() or not self._may_return():
                return how
            while not await self._start_again(how):
                if not self._may_return():
                    return how

    async def stop(self, timeout_s: float) -> None:
        """SIGTERM, and SIGKILL when the time is up."""
        if self._child is not None:
            await self._child.stop(timeout_s)

    def kill(self) -> None:
        """Ends it and everything it started, at once."""
        if self._child is not None:
            self._child.kill()

    async def _run_once(self) -> str:
        """How its process ended."""
        assert self._child is not None, "not started"
        ended = asyncio.create_task(self._child.wait())
        becoming = asyncio.create_task(self._become_ready())
        try:
            await asyncio.wait({ended, becoming}, return_when=asyncio.FIRST_COMPLETED)
            if becoming.done():
                becoming.result()
            return ending(await ended)
        finally:
            for task in (ended, becoming):
                task.cancel()
            await asyncio.gather(ended, becoming, return_exceptions=True)

    async def _become_ready(self) -> None:
        """An engine that fails on the way ends, which `keep` sees; one that does not answer in time
        is busy, and is asked again."""
        while True:
            try:
                await self._await_serving()
                break
            except EngineDead:
                return
            except grpc.aio.AioRpcError:
                await asyncio.sleep(_PROBE_EVERY_S)
        self._served_since = time.monotonic()
        if self.is_ready.is_set():
            self._screen.returned(self.name, self._served_since - self._began)
        self.is_ready.set()

    async def _await_serving(self) -> None:
        config = self.plan.config
        if config.tls_cert is not None:
            await probed(f"{reachable(config.host)}:{config.health_port}", _PROBE_EVERY_S)
            return
        async for stage in stages(self.plan.address):
            self._screen.stage(self.name, stage)
        self.facts = await serving(self.plan.address)

    async def _start_again(self, how: str) -> bool:
        """Behind a pause; False when no process could be made."""
        since = self._served_since
        if since is not None and time.monotonic() - since >= LONGEST_PAUSE_S:
            self._num_failures = 0
        pause_s = min(
            LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(self._num_failures, _MOST_DOUBLINGS)
        )
        self._num_failures += 1
        self._screen.restarts(self.name, how, pause_s)
        await asyncio.sleep(pause_s)
        try:
            await self.start()
        except OSError as failure:  # the machine has no more processes or memory now
            self._screen.line(self.name, f"it cannot be started: {failure}", self._labels)
            return False
        return True


def arguments(config: object) -> list[str]:
    """The flags that make an equal config in another process; secrets do not belong there."""
    settings = options.settings_of(type(config))
    values = {name: getattr(config, name) for name in settings}
    return [
        options.flag_of(name, value)
        for name, value in values.items()
        if value != settings[name].default and not isinstance(value, options.Secret)
    ]


def environ_without(config: object) -> dict[str, str]:
    """Our variables without those that `arguments` has said better."""
    said = {f"TIDEMILL_{name.upper()}" for name in ("config", *options.settings_of(type(config)))}
    return {name: text for name, text in os.environ.items() if name not in said}
