"""`tidemill shard MODEL OUTPUT --tensor-parallel-size N`: cuts a checkpoint for N ranks.

It does not know how.
"""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from engine_service.config import EngineConfig
from engine_service.model_folder import check_model
from tidemill.runtime import options

_COLUMNS = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardOptions:
    """What to cut, for whom, and where it goes."""

    model: str
    """Local folder or hub id of a checkpoint."""
    output: str
    """Folder to make, which engines then take as their model; or the second argument."""
    tensor_parallel_size: int
    """Ranks that will share the model."""
    expert_parallel: bool = False
    """For engines that run with it: each rank's file has all of some experts."""
    revision: str | None = None
    """Branch, tag or commit of a hub model."""
    hf_overrides: dict[str, Any] = field(default_factory=dict)
    """What to read over config.json, as JSON; it stands in the new folder's config.json."""


def run(argv: Sequence[str]) -> int:
    """Writes the folder and says how to use it; returns the exit status."""
    (wanted,) = options.parse(
        [ShardOptions], argv, prog="tidemill shard", positional="model output"
    )
    check_model(wanted.model)
    from engine_service.worker.shard_writer import write_shards

    config = EngineConfig(
        model=wanted.model,
        revision=wanted.revision,
        hf_overrides=wanted.hf_overrides,
        tensor_parallel_size=wanted.tensor_parallel_size,
        expert_parallel=wanted.expert_parallel,
    )
    console = Console(stderr=True, highlight=False)
    hidden = not console.is_terminal
    with Progress(*_COLUMNS, console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task("reading", total=None)

        def report(stage: str, done: int, total: int) -> None:
            bar.update(task, description=stage, completed=done, total=total or None)

        manifest = write_shards(config, Path(wanted.output).expanduser(), report)
    size, num_bytes = manifest.tensor_parallel_size, max(manifest.num_bytes)
    print(f"{wanted.output}: {size} files, at most {num_bytes / 1e9:.2f} GB each")
    experts = " --expert-parallel" * wanted.expert_parallel
    print(
        f"tidemill serve {shlex.quote(wanted.output)} --tensor-parallel-size {size}{experts}",
        file=sys.stderr,
    )
    return 0
