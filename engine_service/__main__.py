"""Runs an engine server from flags: `python -m engine_service --model demo`.

It does not know what the flags mean.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Sequence

import uvloop

from engine_service import limits
from engine_service.child import calm_the_collector, load_calmly
from engine_service.config import EngineConfig
from engine_service.node import NodeRanks
from engine_service.nodes import node_of
from engine_service.server.launch import EngineServer
from engine_service.server.state import SERVING, EngineState, Snapshot
from tidemill.runtime import log, options
from tidemill.runtime.errors import ServiceError

_COUNT = re.compile(r" \d+/\d+$")
_LOG = logging.getLogger("tidemill.engine")


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the flags, serves, and returns the exit status."""
    (config,) = options.parse([EngineConfig], argv, prog="tidemill engine", positional="model")
    return serve(config)


def serve(config: EngineConfig) -> int:
    """One engine in this process until it is told to stop; returns the exit status."""
    log.configure(config.log_level, service="engine")
    load_calmly()
    try:
        limits.check(config)
        node = node_of(config, os.environ)
        if node is not None and node.index:
            return NodeRanks(config, node).run()
    except ServiceError as error:
        _LOG.error("%s", error, extra=log.START_REFUSED)
        return 1
    return uvloop.run(_serve(config))


async def _serve(config: EngineConfig) -> int:
    try:
        server = await EngineServer.start(config, on_state=StateLog())
    except ServiceError as error:
        _LOG.error("%s", error, extra=log.START_REFUSED)
        return 1
    calm_the_collector()
    _LOG.info("listening on %s:%d", config.host, server.port)
    return await server.run()


class StateLog:
    """Logs what an operator would act on: stages of loading and changes of state, once each.

    Counts of the same stage and the turns between READY and BUSY are for WatchState, and an end is
    told by the server that comes to it.
    """

    def __init__(self) -> None:
        self._last = ""

    def __call__(self, snapshot: Snapshot) -> None:
        state = snapshot.state.name.lower()
        is_serving = snapshot.state in SERVING
        text = "ready" if is_serving else f"{state}: {_COUNT.sub('', snapshot.detail)}"
        is_told = text == self._last or snapshot.state is EngineState.ERROR
        level = logging.DEBUG if is_told else logging.INFO
        _LOG.log(level, "%s: %s", state, snapshot.detail)
        self._last = text


if __name__ == "__main__":
    sys.exit(main())
