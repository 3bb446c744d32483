"""The device that a rank computes on. It does not know models."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import TypeVar

import torch

from engine_service.distributed import Group
from engine_service.kernels.jit import (
    give_up_kernels,
    in_one_line,
    is_kernel_failure,
    kernel_fault,
)
from engine_service.out_of_memory import is_out_of_memory
from tidemill.runtime.errors import InvalidRequest, Unsupported

_Started = TypeVar("_Started")
_LOG = logging.getLogger("tidemill.rank")
_FAILURES_S = 60.0
"""Between the first rank and the last in finding out that a kernel does not work."""


def pick_device(name: str, local_rank: int = 0) -> torch.device:
    """`auto` is CUDA when there is one; of several ranks each takes the next device, from the one
    that is named on. Raises InvalidRequest for a device that is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = name.partition(":")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if kind == "cpu" and not index:
        return torch.device("cpu")
    if kind == "cuda" and (index or "0").isdecimal() and int(index or 0) + local_rank < count:
        return torch.device("cuda", int(index or 0) + local_rank)
    if local_rank:
        most = max(0, count - int(index or 0))
        raise InvalidRequest(
            f"the ranks of this host need a GPU each, from cuda:{index or 0} on, and local rank "
            f"{local_rank} has none: there are {most}; run at most {most} ranks here",
            param="device",
        )
    raise InvalidRequest(
        f"device {name!r} is not here; there are: cpu"
        + "".join(f", cuda:{number}" for number in range(count)),
        param="device",
    )


def count_free(name: str) -> int | None:
    """GPUs here from the named one on; None on a CPU, which all ranks share. Raises as
    `pick_device`."""
    device = pick_device(name)
    return torch.cuda.device_count() - (device.index or 0) if device.type == "cuda" else None


def check_devices(name: str, num_ranks: int, num_all: int | None = None) -> None:
    """Raises InvalidRequest where this machine has fewer GPUs than ranks that want one; `num_all`
    are the ranks of all machines."""
    free = count_free(name)
    if free is not None and num_ranks > free:
        here, a_host = (f", {num_ranks} of them here", " a host") if num_all else ("", "")
        raise InvalidRequest(
            f"{num_all or num_ranks} ranks (tensor_parallel_size x pipeline_parallel_size) need a "
            f"GPU each{here}, and from {pick_device(name)} on this machine has {free}; pass at "
            f"most {free}{a_host}, or --device cpu",
            param="tensor_parallel_size",
        )


def open_device(name: str, local_rank: int = 0) -> torch.device:
    """`pick_device`, made this process's own; a warning where Triton does not work on it. Raises
    Unsupported where torch itself does not."""
    device = pick_device(name, local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        _try_torch(device)
        # float32 means IEEE float32 here, whatever the process chose before.
        torch.set_float32_matmul_precision("highest")
        tell_kernel_fault(device)
    return device


def _try_torch(device: torch.device) -> None:
    """Without this a GPU that torch was not built for fails in some stage, by a bare CUDA error."""
    try:
        torch.ones(1, device=device).add_(1).item()
    except RuntimeError as error:
        if "no kernel image" not in str(error):
            raise
        major, minor = torch.cuda.get_device_capability(device)
        raise Unsupported(
            f"torch {torch.__version__} has no kernels for {device}, of compute capability "
            f"{major}.{minor}, only for {', '.join(torch.cuda.get_arch_list())}: install a build of"
            " torch for this GPU, or pass another --device",
            param="device",
        ) from error


def agree_on_kernels(device: torch.device, group: Group) -> None:
    """Kernels run on all ranks or on none: numbers that all compute must have the same bits, and
    ranks with kernels exchange tiles where those without exchange logits."""
    faults = group.all_of(kernel_fault(device))
    if None not in faults or not any(faults):
        return
    rank = next(rank for rank, fault in enumerate(faults) if fault is not None)
    if kernel_fault(device) is None:
        give_up_kernels(device, f"rank {rank} has none: {faults[rank]}")
        tell_kernel_fault(device)


def start_without_failing_kernels(
    device: torch.device, group: Group, start: Callable[[], _Started]
) -> _Started:
    """What `start` makes; where one of Triton's kernels turns out not to work on this device, it is
    made anew without any. So no request ever meets a kernel that has failed before."""
    try:
        return start()
    except Exception as error:
        known = kernel_fault(device) is not None
        if known or is_out_of_memory(error) or not is_kernel_failure(error):
            raise
        give_up_together(device, group, error)
    gc.collect()  # what the failed start holds would be missing beside the next one
    return start()


def give_up_together(device: torch.device, group: Group, error: Exception) -> None:
    """A kernel has failed: from now on none is used here. Other ranks try anew with this one if it
    failed there too; else they wait in a sum that it will not launch, and `error` is raised."""
    give_up_kernels(device, in_one_line(error))
    try:
        group.await_all(_FAILURES_S)
    except RuntimeError:
        raise error from None
    tell_kernel_fault(device)


def tell_kernel_fault(device: torch.device) -> None:
    """Warns if kernels do not work on a CUDA device."""
    fault = kernel_fault(device)
    if fault is not None:
        _LOG.warning(
            "no Triton kernels on %s: plain torch computes instead, without CUDA graphs, and"
            " short steps take several times longer; %s",
            torch.cuda.get_device_name(device),
            fault,
        )


def num_beside(num_stages: int, device: torch.device) -> int:
    """Steps that are launched before the oldest one is collected: one for every stage but the
    first. Of a single stage one too, where the device does not hold up the host: so that it never
    waits. Stages would never wait with one more either, but requests would take turns in so many
    steps, and each of them reads all weights."""
    return max(num_stages - 1, int(device.type == "cuda"))
