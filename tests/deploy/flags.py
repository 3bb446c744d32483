"""The product's own reading of what a container is given: arguments and variables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine_service.config import EngineConfig
from frontend.config import FrontendConfig
from tidemill.runtime import options

KINDS: dict[str, type] = {"engine": EngineConfig, "frontend": FrontendConfig}


def read(service: str, words: Sequence[str], environ: Mapping[str, str]) -> Any:
    """The config that the service would run with.

    AssertionError for a variable that it does not know, which the service itself cannot see;
    SystemExit for everything that the service refuses.
    """
    kind = KINDS[service]
    known = {f"TIDEMILL_{name.upper()}" for name in options.settings_of(kind)}
    unknown = {name for name in environ if name.startswith("TIDEMILL_")} - known
    assert not unknown, f"no such flags of the {service}: {sorted(unknown)}"
    (config,) = options.parse([kind], words, prog=service, environ=environ)
    return config
