"""`tidemill engine`: the engine in this process, or several that this process watches over."""

import asyncio
import os
from collections.abc import Sequence
from dataclasses import replace

from engine_service import limits
from engine_service.config import EngineConfig
from engine_service.nodes import check_nodes, node_of
from tidemill.commands import named_model, ports
from tidemill.commands.engine_group import EnginePlan, engines_of, placed, wishes_of, with_ports
from tidemill.commands.foreign_flags import ADVICE
from tidemill.commands.launcher_config import LauncherConfig
from tidemill.commands.spellings import SPELLINGS
from tidemill.runtime import options


def run(argv: Sequence[str]) -> int:
    """Serves until SIGTERM; returns the exit status. Raises what `named_model.check` does, and
    InvalidRequest for values that no engine takes, and where the environment says no place among
    hosts that is one."""
    launcher, config = options.parse(
        [LauncherConfig, EngineConfig],
        argv,
        prog="tidemill engine",
        positional="model",
        advice=ADVICE,
        spellings=SPELLINGS,
        check=_check,
    )  # --help before slow imports
    node_of(config, os.environ)
    named_model.check(config)
    if launcher.data_parallel_size == 1:
        from engine_service.__main__ import serve

        return serve(config)
    return asyncio.run(_supervise(settled(config, launcher.data_parallel_size)))


def _check(launcher: LauncherConfig, config: EngineConfig) -> None:
    limits.check(config)
    engines_of(config, launcher.data_parallel_size)
    check_nodes(config)


async def _supervise(engines: Sequence[EnginePlan]) -> int:
    from tidemill.commands.supervisor import Supervisor

    return await Supervisor("engine", engines).run()


def settled(config: EngineConfig, count: int) -> list[EnginePlan]:
    """The engines as they are started, with free ports. Where they speak TLS we ask for their
    health on a port of its own, because they may ask for a certificate that we have not."""
    if config.tls_cert is not None and config.health_port is None:
        config = replace(config, health_port=0)
    engines = engines_of(config, count)
    return placed(with_ports(engines, ports.settle(wishes_of(engines))))
