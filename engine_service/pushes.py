"""Parts of many rows, which two ranks copy to each other while they still compute the rest of them.

Reading them over NVLink takes as long as a third of the product that makes them, with the matrix
units idle. Here every chunk of rows is copied as soon as it is made, by an engine that takes no
multiprocessor; the sum of a chunk waits for the peer's copy of it. It does not know models;
`peers.PeerSums` decides when this pays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from engine_service.kernels.pushed_sum import RELEASED, Pushed, add_pushed_triton

MakeRows = Callable[[slice, torch.Tensor | None], torch.Tensor]
"""Computes a part: of these rows, into that tensor of as many, if there is one; returned."""
NUM_CHUNKS = 4
"""Of a sum, all of them told: what was told before a number is always the one before it."""
_WHOLE = 128
"""Rows of a tile: a chunk is as many of them as it needs."""
LEAST_ROWS = 4096
"""Fewer make chunks whose products leave a device half idle."""
_NUMBERS = 1024


class Share(Protocol):
    """Makes a tensor of zeros on every rank, which all of them can write."""

    def __call__(self, shape: tuple[int, ...], dtype: torch.dtype, /) -> tuple[torch.Tensor, ...]:
        """In the order of ranks."""


def split(num_rows: int) -> list[slice]:
    """`NUM_CHUNKS` pieces of at least `LEAST_ROWS` rows, the last one smaller than the others."""
    size = -(-num_rows // (NUM_CHUNKS * _WHOLE)) * _WHOLE
    return [slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]


class Pushes:
    """Sums of two ranks, for `sites` places that they take in turn."""

    def __init__(
        self, rank: int, share: Share, *, sites: int, rows: int, width: int, dtype: torch.dtype
    ) -> None:
        """For up to `rows` x `width`; both ranks must make one. Memory that is shared is for
        parts alone: what was told stays where nobody else writes."""
        self._rank, self._peer = rank, 1 - rank
        self._staged = share((sites, rows, width), dtype)
        self._told = share((sites, NUM_CHUNKS), torch.int32)
        device = self._staged[rank].device
        self._numbers = torch.arange(_NUMBERS, dtype=torch.int32, device=device)
        self._counts = [0] * sites
        self._aside = torch.cuda.Stream(device)

    def add(
        self,
        site: int,
        residual_TE: torch.Tensor,
        part_TE: torch.Tensor,
        make: MakeRows,
        norm: tuple[torch.Tensor, float] | None,
    ) -> torch.Tensor | None:
        """residual := residual + the sum of what `make` gives on both ranks, which goes through
        `part`; returns its RMSNorm (weight, eps), if one is given. `part` may be written again once
        the next sum, at another site, has been launched."""
        self._counts[site] += 1
        number = self._counts[site] % _NUMBERS
        chunks = split(len(residual_TE))
        for index, rows in enumerate(chunks):
            self._push(site, index, number, rows, make(rows, part_TE[rows]))
        normed_TE = None if norm is None else torch.empty_like(residual_TE)
        staged_TE, told = self._staged[self._rank][site], self._told[self._rank][site]
        for index, rows in enumerate(chunks):
            pushed = Pushed(part_TE[rows], staged_TE[rows], told[index:], number)
            normed = None if normed_TE is None else normed_TE[rows]
            add_pushed_triton(residual_TE[rows], pushed, norm, normed)
        return normed_TE

    def _push(self, site: int, index: int, number: int, rows: slice, part: torch.Tensor) -> None:
        """Behind what has been launched, and beside what will be."""
        self._aside.wait_stream(torch.cuda.current_stream(part.device))
        with torch.cuda.stream(self._aside):
            self._staged[self._peer][site][rows].copy_(part)
            told = self._told[self._peer][site][index : index + 1]
            told.copy_(self._numbers[number : number + 1])

    def release(self) -> None:
        """This rank waits for the other no more, as `peer_sum.release`, on the current stream."""
        told = self._told[self._rank]
        told.copy_(torch.full(told.shape, RELEASED, dtype=torch.int32))
