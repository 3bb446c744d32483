"""Which kind of device a rank computes on, and whether ranks of these kinds can share a model.

It does not know how ranks tell each other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tidemill.runtime.errors import FailedPrecondition

CPU = "the CPU"


def kind_of(device: torch.device) -> str:
    """In words: what decides which kernels run there and in which order they add."""
    if device.type != "cuda":
        return CPU
    gpu = torch.cuda.get_device_properties(device)
    return (
        f"{gpu.name} (compute capability {gpu.major}.{gpu.minor}, "
        f"{gpu.multi_processor_count} multiprocessors)"
    )


def check_kinds(kinds: Sequence[str], num_stages: int) -> None:
    """`kinds` of all ranks, the first ones being those of the first of `num_stages` stages.

    Raises FailedPrecondition where ranks of one stage differ: what each of them computes for itself
    must have the same bits. Stages may be of different kinds of GPU.
    """
    size = len(kinds) // num_stages
    for rank, kind in enumerate(kinds):
        first = rank - rank % size
        if kind != kinds[first]:
            _refuse(kinds, first, rank, "share every layer, which takes GPUs of one kind")
        if (kind == CPU) != (kinds[0] == CPU):
            _refuse(kinds, 0, rank, "are all on GPUs or all on the CPU")


def _refuse(kinds: Sequence[str], first: int, rank: int, need: str) -> None:
    raise FailedPrecondition(
        f"rank {first} computes on {kinds[first]} and rank {rank} on {kinds[rank]}, but ranks "
        f"{need}: choose others (--device, CUDA_VISIBLE_DEVICES), or give each kind of GPU stages "
        "of its own (--pipeline-parallel-size)",
        reason="RANKS_DIFFER",
        param="device",
    )
