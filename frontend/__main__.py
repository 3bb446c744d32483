"""Entry of the frontend process: flags in, exit status out."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Sequence

import uvloop

from frontend import open_files
from frontend.app import FrontendServer
from frontend.config import FrontendConfig
from tidemill.runtime import log, options
from tidemill.runtime.errors import ServiceError

_LOG = logging.getLogger("tidemill.frontend")
_CALM = (50_000, 20, 20)
"""Thresholds of the cycle collector. With Python's own it takes a tenth of the time of 256 streams,
for cycles that a token does not make; those of requests still go."""


async def _serve(config: FrontendConfig) -> int:
    gc.set_threshold(*_CALM)
    server = await FrontendServer.start(config)
    return await server.run()


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the flags, serves, and returns the exit status."""
    (config,) = options.parse([FrontendConfig], argv, prog="tidemill frontend")
    return serve(config)


def serve(config: FrontendConfig) -> int:
    """A frontend in this process until it is told to stop; returns the exit status, 1 for a refused
    start, which is logged."""
    log.configure(config.log_level, service="frontend")
    open_files.allow_many()
    try:
        return uvloop.run(_serve(config))
    except ServiceError as error:
        _LOG.error("%s", error, extra=log.START_REFUSED)
        return 1


if __name__ == "__main__":
    sys.exit(main())
