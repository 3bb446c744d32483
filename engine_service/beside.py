"""Sums of many rows over three ranks or more, each chunk beside a product: the one that makes the
next chunk, or one that reads the first.

A sum of 8,192 rows takes half as long as the product ahead of it, or longer, and moves bytes alone:
the matrix units are idle. Here a few multiprocessors add one chunk of rows while the others compute
what does not wait for it. The library's kernels occupy a device until they end, so they are told to
leave those few alone, as long as there is something to add. It does not know models;
`peers.PeerSums` decides when this pays.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch

from engine_service.kernels.peer_sum import Parts
from engine_service.kernels.rounds_sum import add_parts_rounds_triton
from engine_service.pushes import MakeRows, split

_NUM_SMS = 24
"""That add beside a product: a chunk of 2,048 rows in some 150 us, where a quarter of a product of
6,400 inputs takes 200. With 40 the products lose more than the sums win; 12 are too slow."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of a sum that come together."""

    rows: slice
    is_last: bool
    """Whether none is added beside what reads it, of which only the library's products leave room
    for that."""
    _ready: torch.cuda.Event

    @contextmanager
    def taken(self) -> Iterator[None]:
        """What is launched inside comes behind the sum of these rows, and beside that of later
        ones."""
        self._ready.wait()
        with nullcontext() if self.is_last else _leaving():
            yield


class Summed(NamedTuple):
    """What a sum leaves beside the residual stream."""

    normed_TE: torch.Tensor | None = None
    """Its RMSNorm, where it has that for nothing."""
    pieces: Sequence[Piece] = ()
    """All of its rows, in the order in which they come, to be taken in that order; none: they are
    all there."""


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
        *,
        in_pieces: bool,
    ) -> Summed:
        """residual := residual + the sum of what `make` gives on all ranks, and its RMSNorm
        (weight, eps), if one is given. `in_pieces`: the first chunk comes ahead of the others,
        which are added beside what reads it."""
        shared, main = self._sites[site], torch.cuda.current_stream(self._device)
        normed_TE = None if norm is None else torch.empty_like(residual_TE)
        chunks = split(len(residual_TE))
        for index, rows in enumerate(chunks):
            with _leaving() if index else nullcontext():
                make(rows, shared.parts[self._rank][rows])
            # No product of this sum waits for it, so that no rank waits for what another holds up.
            self._aside.wait_stream(main)
            few = _NUM_SMS if in_pieces or index + 1 < len(chunks) else None
            normed = None if normed_TE is None else normed_TE[rows]
            own = shared._replace(parts=tuple(part[rows] for part in shared.parts))
            with torch.cuda.stream(self._aside):
                add_parts_rounds_triton(
                    residual_TE[rows], own, self._rank, norm, normed_TE=normed, most_sms=few
                )
                if not index:
                    first = Piece(rows, False, self._aside.record_event())
        if not in_pieces:
            main.wait_stream(self._aside)
            return Summed(normed_TE)
        rest = slice(first.rows.stop, len(residual_TE))
        return Summed(normed_TE, (first, Piece(rest, True, self._aside.record_event())))


@contextmanager
def _leaving() -> Iterator[None]:
    """The library's products leave a few multiprocessors of this device to sums meanwhile."""
    set_target = _set_target()
    if set_target is None:
        yield
        return
    handle = ctypes.c_void_p(torch.cuda.current_blas_handle())
    all_of_them = torch.cuda.get_device_properties().multi_processor_count
    set_target(handle, all_of_them - _NUM_SMS)
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
