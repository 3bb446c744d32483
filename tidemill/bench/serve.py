"""Load on a running server, open loop or closed, and what its clients see of it.

It knows only where its parts are: flags in `traffic.options`, the run in `traffic.run`.
"""

from __future__ import annotations

from typing import Any

from engine_service.config import EngineConfig
from tidemill.bench.traffic.options import ServeOptions as ServeOptions
from tidemill.bench.traffic.report import table as table


def run(options: ServeOptions, config: EngineConfig) -> dict[str, Any]:
    """What `traffic.run.run` measures and raises; loaded here, so that --help is instant."""
    from tidemill.bench.traffic import run as traffic_run

    return traffic_run.run(options, config)


def check(found: dict[str, Any]) -> None:
    """Raises what `traffic.run.check` raises."""
    from tidemill.bench.traffic import run as traffic_run

    traffic_run.check(found)
