"""Runs an engine server from flags: `python -m engine_service --model demo`.

It does not know what the flags mean.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

import uvloop

from engine_service.config import EngineConfig
from engine_service.server.launch import EngineServer
from engine_service.server.state import Snapshot
from tidemill.runtime import log, options
from tidemill.runtime.errors import ServiceError

_LOG = logging.getLogger("tidemill.engine")


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the flags, serves, and returns the exit status."""
    (config,) = options.parse([EngineConfig], argv, prog="tidemill engine", positional="model")
    log.configure(config.log_level, service="engine")
    return uvloop.run(_serve(config))


async def _serve(config: EngineConfig) -> int:
    try:
        server = await EngineServer.start(config, on_state=_log_state)
    except ServiceError as error:
        _LOG.error("%s", error)
        return 1
    _LOG.info("listening on %s:%d", config.host, server.port)
    return await server.run()


def _log_state(snapshot: Snapshot) -> None:
    _LOG.info("%s: %s", snapshot.state.name.lower(), snapshot.detail)


if __name__ == "__main__":
    sys.exit(main())
