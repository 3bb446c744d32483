"""Watches over engines and their frontend, as far as there is one: starts them, and ends them in
order. It does not know models or requests.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence

from frontend.config import FrontendConfig
from tidemill.commands import ports
from tidemill.commands.child import Child
from tidemill.commands.engine_group import EnginePlan
from tidemill.commands.engine_state import healthy, probed
from tidemill.commands.keeper import MODULE, Keeper, arguments, environ_without
from tidemill.commands.screen import Screen
from tidemill.runtime import options
from tidemill.runtime.endings import ending

_MARGIN_S = 10.0  # for a service to close down, beside its drain
_HEALTH_EVERY_S = 0.1
_FRONTEND = "frontend"


class Supervisor:
    """Children, and what is said about them.

    It goes on while an engine runs: one that has ended is started again meanwhile. With the last
    one, with one that never came to serve, and with the frontend everything ends.
    """

    def __init__(
        self, verb: str, engines: Sequence[EnginePlan], frontend: FrontendConfig | None = None
    ) -> None:
        """`verb` is the command that errors name."""
        self._frontend = frontend
        is_group = len(engines) > 1
        names = [f"engine {one.address}" if is_group else MODULE for one in engines]
        self._screen = Screen(f"tidemill {verb}", names)
        self._stop = asyncio.Event()
        self._keepers = [
            Keeper(
                plan,
                self._screen,
                name=name,
                labels={"engine": plan.address} if is_group else {},
                may_return=self._is_worth_it,
            )
            for plan, name in zip(engines, names, strict=True)
        ]
        self._front: Child | None = None
        engine = engines[0].config
        self._patience_s = engine.drain_pause_s + engine.drain_timeout_s + _MARGIN_S

    def _is_worth_it(self) -> bool:
        """Nothing is started again in the place of the last engine: that is for whoever started
        us, who can see that nothing serves and may know better where to start it."""
        return not self._stop.is_set() and any(one.is_running for one in self._keepers)

    async def run(self) -> int:
        """Starts all, shows the Ready block, waits for an end, and stops what still runs."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._signalled)
        try:
            # The engines first: they take longest.
            for keeper in self._keepers:
                await keeper.start()
            if self._frontend is not None:
                await self._start_frontend(self._frontend)
            return await self._watch()
        finally:
            self._screen.close()
            # The frontend first: its running requests still need the engines, which then drain
            # together.
            if self._front is not None:
                await self._front.stop(self._patience_s)
            await asyncio.gather(*(one.stop(self._patience_s) for one in self._keepers))
            self._screen.rest()

    async def _start_frontend(self, config: FrontendConfig) -> None:
        self._front = await Child.start(
            _FRONTEND,
            arguments(config),
            environ=environ_without(config) | _secrets(config),
            on_line=lambda line: self._screen.line(_FRONTEND, line, {}),
        )

    async def _watch(self) -> int:
        stop = asyncio.create_task(self._stop.wait())
        ready = asyncio.create_task(self._become_ready())
        ends = {asyncio.create_task(one.keep()): one.name for one in self._keepers}
        if self._front is not None:
            ends[asyncio.create_task(_ended(self._front))] = _FRONTEND
        await asyncio.wait({stop, ready, *ends}, return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            ready.result()
            await asyncio.wait({stop, *ends}, return_when=asyncio.FIRST_COMPLETED)
        ended = {name: task for task, name in ends.items() if task.done()}
        for task in (stop, ready, *ends):
            task.cancel()
        await asyncio.gather(stop, ready, *ends, return_exceptions=True)
        if self._stop.is_set():
            return 0
        for name, task in ended.items():
            self._screen.died(name, task.result())
        return 1

    async def _become_ready(self) -> None:
        """Shows that all serve."""
        for keeper in self._keepers:
            await keeper.is_ready.wait()
        frontend = self._frontend
        if frontend is None:
            self._screen.all_serve([keeper.plan.address for keeper in self._keepers])
            return
        self._screen.waits_for_frontend()
        host = ports.reachable(frontend.host)
        if frontend.health_port is None:
            await healthy(host.strip("[]"), frontend.http_port, _HEALTH_EVERY_S)
        else:  # whoever speaks TLS may ask for a certificate that we have not
            await probed(f"{host}:{frontend.health_port}", _HEALTH_EVERY_S)
        facts = [keeper.facts for keeper in self._keepers if keeper.facts is not None]
        self._screen.ready(facts, frontend, host)

    def _signalled(self) -> None:
        if self._stop.is_set():  # asked twice: no draining
            for one in (*self._keepers, *([self._front] if self._front else ())):
                one.kill()
        self._stop.set()


async def _ended(child: Child) -> str:
    return ending(await child.wait())


def _secrets(config: FrontendConfig) -> dict[str, str]:
    """Variables for the fields that `arguments` leaves out."""
    values = {name: getattr(config, name) for name in options.settings_of(type(config))}
    return {
        f"TIDEMILL_{name.upper()}": value
        for name, value in values.items()
        if isinstance(value, options.Secret)
    }
