"""Entry of the frontend process: flags in, exit status out."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import uvloop

from frontend.app import FrontendServer
from frontend.config import FrontendConfig
from tidemill.runtime import log, options
from tidemill.runtime.errors import ServiceError


async def serve(config: FrontendConfig) -> int:
    """Runs a frontend until it is told to stop; returns the exit status."""
    server = await FrontendServer.start(config)
    return await server.run()


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the flags and serves; a refused start is printed, with status 1."""
    given = sys.argv[1:] if argv is None else argv
    (config,) = options.parse([FrontendConfig], given, prog="tidemill frontend")
    log.configure(config.log_level, service="frontend")
    try:
        return uvloop.run(serve(config))
    except ServiceError as error:
        print(f"tidemill frontend: {error.message}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
