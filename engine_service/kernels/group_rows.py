"""Rows sorted by the expert that they are for, every expert's padded to whole tiles.

Shape legend: R rows, X experts, S slices of rows that follow each other.

Where tiles lie is found out on the device. Slices are counted side by side first; then a program
knows where its slice's rows begin at every expert, and places them by comparing all pairs of a
block: in all R times as many steps as a block has rows, where one that looks for the rows of an
expert among all of them takes R X. Nothing is added atomically: rows keep their order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from engine_service.kernels.jit import jit, overlaps_launches, tl, triton

_BLOCKS = (64, 256)
"""Rows that are compared with each other, few and many: two numbers, so that what a start of the
engine computes has compiled what prompts will need."""
_MOST_SLICES = 64
"""Every program reads the counts of all."""
_TILES = 16
"""Tiles whose expert one program finds."""


@dataclass(frozen=True, slots=True)
class RowGroups:
    """Rows sorted by expert in tiles of `block_m`; only tiles that have an expert are filled."""

    rows: torch.Tensor
    """[tiles * block_m] int32: rows in their order; R where a tile is padded."""
    experts: torch.Tensor
    """[tiles] int32: the expert of a tile; X for tiles that are not needed."""


def most_tiles(num_rows: int, num_experts: int, block_m: int) -> int:
    """Tiles that `num_rows` rows can need: every expert may leave one tile all but empty, and every
    tile holds a row."""
    return min(num_rows, (num_rows + num_experts * (block_m - 1)) // block_m)


def group_rows_ref(experts_R: torch.Tensor, num_experts: int, block_m: int) -> RowGroups:
    """Rows of equal expert in ascending order, experts in ascending order."""
    chosen = experts_R.tolist()
    num_tiles = most_tiles(len(chosen), num_experts, block_m)
    rows: list[int] = []
    experts: list[int] = []
    for expert in range(num_experts):
        own = [row for row, other in enumerate(chosen) if other == expert]
        own += [len(chosen)] * (-len(own) % block_m)
        rows += own
        experts += [expert] * (len(own) // block_m)
    rows += [len(chosen)] * (num_tiles * block_m - len(rows))
    experts += [num_experts] * (num_tiles - len(experts))
    return RowGroups(*(torch.tensor(x, dtype=torch.int32) for x in (rows, experts)))


@jit
def _load_experts(
    expert_ptr: tl.tensor, row: tl.tensor, R: tl.tensor, X: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """(experts of rows, int32, whether a row has one of the X)."""
    inside = row < R
    expert = tl.load(expert_ptr + row, mask=inside, other=0).to(tl.int32)
    return expert, inside & (expert >= 0) & (expert < X)


@partial(jit, do_not_specialize=["R", "slice_rows"])
def _count_rows_kernel(
    expert_ptr: tl.tensor,
    count_ptr: tl.tensor,
    R: tl.tensor,
    X: tl.tensor,
    slice_rows: tl.tensor,
    BLOCK_R: tl.constexpr,
    BLOCK_X: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """A program counts the rows of every expert in its slice."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    counts = tl.zeros([BLOCK_X], tl.int32)
    for start in range(0, slice_rows, BLOCK_R):
        row = tl.program_id(0) * slice_rows + start + tl.arange(0, BLOCK_R)
        expert, real = _load_experts(expert_ptr, row, R, X)
        counts += tl.histogram(expert, BLOCK_X, mask=real)
    tl.store(count_ptr + tl.program_id(0) * BLOCK_X + tl.arange(0, BLOCK_X), counts)


@jit
def _sum_slices(
    count_ptr: tl.tensor,
    own: tl.tensor,
    num_slices: tl.tensor,
    BLOCK_X: tl.constexpr,
    BLOCK_S: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """[X] twice: rows of every expert in all slices, and in those before the own one."""
    counts = tl.zeros([BLOCK_X], tl.int32)
    before = tl.zeros([BLOCK_X], tl.int32)
    column = tl.arange(0, BLOCK_X)[None, :]
    for start in range(0, num_slices, BLOCK_S):
        part = start + tl.arange(0, BLOCK_S)[:, None]
        found = tl.load(count_ptr + part * BLOCK_X + column, mask=part < num_slices, other=0)
        counts += tl.sum(found, axis=0)
        before += tl.sum(tl.where(part < own, found, 0), axis=0)
    return counts, before


@partial(jit, do_not_specialize=["R", "slice_rows", "num_slices", "num_tiles"])
def _group_rows_kernel(
    expert_ptr: tl.tensor,
    count_ptr: tl.tensor,
    row_ptr: tl.tensor,
    tile_ptr: tl.tensor,
    R: tl.tensor,
    X: tl.tensor,
    slice_rows: tl.tensor,
    num_slices: tl.tensor,
    num_tiles: tl.tensor,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_X: tl.constexpr,
    BLOCK_S: tl.constexpr,
    TILES: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """A program places the rows of one slice, and finds the expert of TILES tiles. One slice alone
    has not been counted."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    own, offset = tl.program_id(0), tl.arange(0, BLOCK_R)
    if count_ptr is None:
        expert, real = _load_experts(expert_ptr, offset, R, X)
        counts, before = tl.histogram(expert, BLOCK_X, mask=real), tl.zeros([BLOCK_X], tl.int32)
    else:
        counts, before = _sum_slices(count_ptr, own, num_slices, BLOCK_X, BLOCK_S)
    tiles = (counts + BLOCK_M - 1) // BLOCK_M
    stop = tl.cumsum(tiles, axis=0)
    first_row = (stop - tiles) * BLOCK_M
    if own < num_slices:
        place = first_row + before
        for start in range(0, slice_rows, BLOCK_R):
            row = own * slice_rows + start + offset
            expert, real = _load_experts(expert_ptr, row, R, X)
            expert = tl.where(real, expert, BLOCK_X)
            ahead = (expert[:, None] == expert[None, :]) & (offset[:, None] < offset[None, :])
            begin = tl.gather(place, tl.where(real, expert, 0), axis=0)
            tl.store(row_ptr + begin + tl.sum(ahead.to(tl.int32), axis=0), row, mask=real)
            if start + BLOCK_R < slice_rows:
                place += tl.histogram(expert, BLOCK_X, mask=real)
    tile = own * TILES + tl.arange(0, TILES)
    expert = tl.sum((stop[:, None] <= tile[None, :]).to(tl.int32), axis=0)
    tl.store(tile_ptr + tile, tl.minimum(expert, X), mask=tile < num_tiles)
    is_own = tl.arange(0, BLOCK_X)[:, None] == expert[None, :]
    end = tl.sum(tl.where(is_own, (first_row + counts)[:, None], 0), axis=0)
    pad = tile[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    tl.store(row_ptr + pad, R, mask=(expert < X)[:, None] & (pad >= end[:, None]))


def group_rows_triton(experts_R: torch.Tensor, num_experts: int, block_m: int) -> RowGroups:
    """`group_rows_ref` in one launch, or two of more than 256 rows; rows of tiles that are not
    needed hold anything."""
    num_rows, device = len(experts_R), experts_R.device
    num_tiles = most_tiles(num_rows, num_experts, block_m)
    rows = torch.empty(num_tiles * block_m, dtype=torch.int32, device=device)
    experts = torch.empty(num_tiles, dtype=torch.int32, device=device)
    overlap = overlaps_launches(device)
    block_r, block_x = _BLOCKS[num_rows > _BLOCKS[0]], triton.next_power_of_2(num_experts)
    slice_rows = max(triton.cdiv(triton.cdiv(num_rows, _MOST_SLICES), block_r), 1) * block_r
    num_slices = triton.cdiv(num_rows, slice_rows)
    cut = {"BLOCK_R": block_r, "BLOCK_X": block_x, "PDL": overlap}
    counts = None
    if num_slices > 1:
        counts = torch.empty((num_slices, block_x), dtype=torch.int32, device=device)
        _count_rows_kernel[(num_slices,)](
            experts_R, counts, num_rows, num_experts, slice_rows,
            **cut, num_warps=4, launch_pdl=overlap,
        )  # fmt: skip
    _group_rows_kernel[(max(num_slices, triton.cdiv(num_tiles, _TILES)),)](
        experts_R,
        counts,
        rows,
        experts,
        num_rows,
        num_experts,
        slice_rows,
        num_slices,
        num_tiles,
        **cut,
        BLOCK_M=block_m,
        BLOCK_S=16,
        TILES=_TILES,
        num_warps=8,
        launch_pdl=overlap,
    )
    return RowGroups(rows, experts)
