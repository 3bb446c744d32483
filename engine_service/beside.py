"""Sums of many rows over three ranks or more, each chunk beside the product that makes the next.

A sum of 8,192 rows takes half as long as the product ahead of it, or longer, and moves bytes alone:
the matrix units are idle. Here a few multiprocessors add one chunk of rows while the others compute
the next. The library's kernels occupy a device until they end, so they are told to leave those few
alone. It does not know models; `peers.PeerSums` decides when this pays.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import torch

from engine_service.kernels.peer_sum import Parts
from engine_service.kernels.rounds_sum import add_parts_rounds_triton
from engine_service.pushes import MakeRows, split

_NUM_SMS = 24
"""That add beside a product: a chunk of 2,048 rows in some 150 us, where a quarter of a product of
6,400 inputs takes 200. With 40 the products lose more than the sums win; 12 are too slow."""


class BesideSums:
    """Sums of the ranks of one machine, in chunks."""

    def __init__(self, rank: int, sites: Sequence[Parts], device: torch.device) -> None:
        self._rank, self._sites, self._device = rank, sites, device
        # What adds goes first wherever both could.
        self._aside = torch.cuda.Stream(device, priority=-1)

    def add(
        self,
        site: int,
        residual_TE: torch.Tensor,
        make: MakeRows,
        norm: tuple[torch.Tensor, float] | None,
    ) -> torch.Tensor | None:
        """residual := residual + the sum of what `make` gives on all ranks; returns its RMSNorm
        (weight, eps), if one is given."""
        shared, main = self._sites[site], torch.cuda.current_stream(self._device)
        normed_TE = None if norm is None else torch.empty_like(residual_TE)
        chunks = split(len(residual_TE))
        for index, rows in enumerate(chunks):
            with _leaving(_NUM_SMS if index else 0, self._device):
                make(rows, shared.parts[self._rank][rows])
            # Products never wait for sums, so that no rank waits for what another holds up.
            self._aside.wait_stream(main)
            few = _NUM_SMS if index + 1 < len(chunks) else None
            normed = None if normed_TE is None else normed_TE[rows]
            own = shared._replace(parts=tuple(part[rows] for part in shared.parts))
            with torch.cuda.stream(self._aside):
                add_parts_rounds_triton(
                    residual_TE[rows], own, self._rank, norm, normed_TE=normed, most_sms=few
                )
        main.wait_stream(self._aside)
        return normed_TE


@contextmanager
def _leaving(num_sms: int, device: torch.device) -> Iterator[None]:
    """The library's products leave so many multiprocessors alone meanwhile."""
    set_target = _set_target()
    if not num_sms or set_target is None:
        yield
        return
    handle = ctypes.c_void_p(torch.cuda.current_blas_handle())
    all_of_them = torch.cuda.get_device_properties(device).multi_processor_count
    set_target(handle, all_of_them - num_sms)
    try:
        yield
    finally:
        set_target(handle, 0)


@cache
def _set_target() -> ctypes._NamedFuncPointer | None:
    """cublasSetSmCountTarget of the library that torch has loaded; without it sums find room when
    products end."""
    try:
        major = (torch.version.cuda or "").split(".")[0]
        return ctypes.CDLL(f"libcublas.so.{major}").cublasSetSmCountTarget
    except (OSError, AttributeError):
        return None
