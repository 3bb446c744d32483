"""The product's own reading of what a container is given: arguments, variables and folders."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
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


def unwritable(service: str, mounted: Iterable[str]) -> list[str]:
    """The folders that the service's image writes to and that are on its read-only root, where
    `mounted` are mounted."""
    file = Path(__file__).parents[2] / "docker" / f"{service}.Dockerfile"
    written = re.findall(r"\b(?:HOME|[A-Z_]+_(?:HOME|DIR))=(/\S+)", file.read_text())
    assert len(written) > 1, f"{file} says nothing of HOME and caches"
    roots = tuple(f"{folder}/" for folder in mounted)
    return [folder for folder in written if not f"{folder}/".startswith(roots)]
