"""What an operator may choose of how many engines are started. No engine knows it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherConfig:
    """Flags of `tidemill serve` and `tidemill engine` alone, beside those of the services."""

    data_parallel_size: int = 1
    """Whole engines of the model on this machine, each with processes, GPUs and ports of its own:
    engine number i (from 0) takes the i-th tensor_parallel_size x pipeline_parallel_size GPUs from
    --device on (on the CPU a share of the cores), and its ports are i above those given."""
