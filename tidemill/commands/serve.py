"""`tidemill serve [MODEL]`: starts engines and a frontend, and watches over them.

What it does with them stands in supervisor.py; here is how their flags become one set.
"""

import asyncio
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from engine_service import limits as engine_limits
from engine_service.config import EngineConfig
from engine_service.nodes import check_nodes, serving_node
from frontend import limits as frontend_limits
from frontend.config import FrontendConfig
from tidemill.commands import named_model, ports
from tidemill.commands.engine_group import EnginePlan, engines_of, placed, wishes_of, with_ports
from tidemill.commands.foreign_flags import ADVICE
from tidemill.commands.launcher_config import LauncherConfig
from tidemill.commands.spellings import SPELLINGS
from tidemill.commands.supervisor import Supervisor
from tidemill.runtime import options
from tidemill.runtime.errors import FailedPrecondition

_FOREVER_S = 1e6  # the frontend waits for a model of any size; we see when either one ends
_OF_THE_WAY = ("engine", "engine_tls_ca", "engine_tls_cert", "engine_tls_key", "engine_tls_name")


def run(argv: Sequence[str]) -> int:
    """Serves until SIGTERM, SIGINT or the end of a service; returns the exit status.
    Raises what `named_model.check` does, FailedPrecondition or InvalidRequest for values that a
    service would refuse, and on a host whose ranks follow another's."""
    launcher, engine, frontend = options.parse(
        [LauncherConfig, EngineConfig, FrontendConfig],
        argv,
        prog="tidemill serve",
        advice=ADVICE,
        spellings=SPELLINGS,
        positional="model",
        hidden=("connect_timeout_s", *_OF_THE_WAY),
        check=_check,
    )
    serving_node(engine, os.environ)
    named_model.check(engine)
    return asyncio.run(_serve(*settled(engine, frontend, launcher.data_parallel_size)))


def _check(launcher: LauncherConfig, engine: EngineConfig, frontend: FrontendConfig) -> None:
    engine_limits.check(engine)
    if engine.role == "prefill":
        raise FailedPrecondition(
            "--role is prefill: an engine that generates nothing would be all that this frontend "
            "has, and answer nobody; start it with tidemill engine, or leave --role out",
            param="role",
        )
    engines_of(engine, launcher.data_parallel_size)
    check_nodes(engine)
    frontend_limits.check(frontend)


async def _serve(engines: Sequence[EnginePlan], frontend: FrontendConfig) -> int:
    return await Supervisor("serve", engines, frontend).run()


def settled(
    engine: EngineConfig, frontend: FrontendConfig, num_engines: int = 1
) -> tuple[list[EnginePlan], FrontendConfig]:
    """All as they are started: with free ports, and the engines for this machine alone.

    An engine asks nobody for a key, and certificates and probes are the frontend's.
    """
    home = "::1" if ":" in engine.host else "127.0.0.1"
    engine = replace(
        engine, host=home, tls_cert=None, tls_key=None, tls_client_ca=None, health_port=None
    )
    engines = engines_of(engine, num_engines)
    chosen = {"grpc_port": frontend.grpc_port, "http_port": frontend.http_port}
    if frontend.health_port is not None or frontend.tls_cert is not None:
        chosen["health_port"] = frontend.health_port or 0
    fronts = [
        ports.Wish(frontend.host, options.flag_of(name), port) for name, port in chosen.items()
    ]
    found = ports.settle([*fronts, *wishes_of(engines)])
    plans = placed(with_ports(engines, found[len(fronts) :]))
    changes: dict[str, Any] = dict(zip(chosen, found, strict=False))
    addresses = ",".join(one.address for one in plans)
    return plans, replace(frontend, engine=addresses, connect_timeout_s=_FOREVER_S, **changes)
