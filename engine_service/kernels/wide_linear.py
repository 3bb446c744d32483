"""Products of bfloat16 rows with a float32 weight, as exact as float32 has them.

Tensor cores multiply bfloat16. A float32 number is the sum of three bfloat16 numbers, each the
rounding of what the ones before leave, and their products with a bfloat16 number are exact in
float32: three products on tensor cores are one in float32, at a multiple of its rate (as in
Markidis et al. 2018, arXiv 1803.04014, with two halves). The three are made once: making them
beside the products was more than half of a program's instructions. It does not know what is
multiplied. Shape legend: T rows, I inputs, O outputs.
"""

from __future__ import annotations

from functools import partial

import torch
from torch.nn import functional

from engine_service.kernels.arrivals import arrivals, came_last
from engine_service.kernels.jit import (
    fitting_stages,
    jit,
    overlaps_launches,
    runs_triton,
    tl,
    triton,
)

_BLOCK_O, _BLOCK_I = 64, 64
_WAVE = 256
"""Programs that fill the device, two a multiprocessor: rows, and then inputs, are cut smaller where
there would be fewer."""
_MIN_INPUTS, _MOST_PARTS = 256, 8
"""Of a program that shares its sum; of one sum."""


def wide_linear_ref(x_TI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
    """[T, O] x W^T in the format of the weight."""
    return functional.linear(x_TI.to(weight_OI.dtype), weight_OI)


def split_weight(weight_OI: torch.Tensor) -> torch.Tensor:
    """[3, O, I] bfloat16 numbers whose sum is the float32 weight, largest first; what is smaller
    than bfloat16 has it is dropped."""
    assert weight_OI.dtype is torch.float32
    pieces, rest = [], weight_OI
    for _ in range(3):
        pieces.append(rest.to(torch.bfloat16))
        rest = rest - pieces[-1].to(torch.float32)
    return torch.stack(pieces)


class WideWeight:
    """A float32 weight, and where tensor cores multiply it the numbers that it is the sum of."""

    def __init__(self, weight_OI: torch.Tensor) -> None:
        self.weight_OI = weight_OI
        self._pieces_3OI: torch.Tensor | None = None

    def split(self, dtype: torch.dtype) -> None:
        """Once the weight is filled, for rows in `dtype`."""
        splits = dtype is torch.bfloat16 and self.weight_OI.dtype is torch.float32
        if splits and runs_triton(self.weight_OI):
            self._pieces_3OI = split_weight(self.weight_OI)

    def product(self, x_TI: torch.Tensor) -> torch.Tensor:
        """`wide_linear_ref`; one launch where the weight is split."""
        pieces = self._pieces_3OI
        if pieces is not None and len(x_TI) and runs_triton(x_TI):
            return wide_linear_triton(x_TI, pieces)
        return wide_linear_ref(x_TI, self.weight_OI)


@partial(jit, do_not_specialize=["num_rows"])
def _wide_linear_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    part_ptr: tl.tensor,
    arrived_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_outputs: tl.tensor,
    num_inputs: tl.tensor,
    x_stride: tl.tensor,
    piece_stride: tl.tensor,
    BLOCK_T: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Programs of one row and column of the grid compute BLOCK_O outputs of BLOCK_T rows, each from
    its share of the inputs. How many they are is no constant: nothing is compiled anew for it."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    out = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    column = tl.arange(0, BLOCK_I)[None, :]
    x_ptrs = x_ptr + row.to(tl.int64)[:, None] * x_stride + column
    weight_ptrs = weight_ptr + out[:, None] * num_inputs + column
    acc = tl.zeros([BLOCK_O, BLOCK_T], tl.float32)
    share = tl.cdiv(tl.cdiv(num_inputs, BLOCK_I), tl.num_programs(2)) * BLOCK_I
    first = tl.program_id(2) * share
    for start in range(first, tl.minimum(first + share, num_inputs), BLOCK_I):
        inside = start + column < num_inputs
        x = tl.trans(tl.load(x_ptrs + start, mask=(row < num_rows)[:, None] & inside, other=0.0))
        real = (out < num_outputs)[:, None] & inside
        high = tl.load(weight_ptrs + start, mask=real, other=0.0)
        middle = tl.load(weight_ptrs + piece_stride + start, mask=real, other=0.0)
        low = tl.load(weight_ptrs + 2 * piece_stride + start, mask=real, other=0.0)
        # What is small first; and each tile's sum by itself, because tensor cores cut what they add
        # where float32 rounds: over all inputs that is ten times the error of float32.
        part = tl.dot(low, x)
        part = tl.dot(middle, x, part)
        acc += tl.dot(high, x, part)
    is_last = True
    if tl.num_programs(2) > 1:
        acc, is_last = _sum_parts(acc, part_ptr, arrived_ptr)
    if is_last:
        out_ptrs = out_ptr + row.to(tl.int64)[:, None] * num_outputs + out[None, :]
        real = (row < num_rows)[:, None] & (out < num_outputs)[None, :]
        tl.store(out_ptrs, tl.trans(acc), mask=real)


@jit
def _sum_parts(
    acc: tl.tensor, part_ptr: tl.tensor, arrived_ptr: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """(all parts of a tile's sum, added in their order; whether this program came last and so has
    them). `part` is [tiles, parts, O, T]."""
    num_parts = tl.num_programs(2)
    tile = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    ROWS: tl.constexpr = acc.shape[0]
    COLUMNS: tl.constexpr = acc.shape[1]
    place = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    part_ptrs = part_ptr + tile * (num_parts * ROWS * COLUMNS) + place
    tl.store(part_ptrs + tl.program_id(2) * (ROWS * COLUMNS), acc, cache_modifier=".cg")
    is_last = came_last(arrived_ptr + tile, num_parts)
    if is_last:
        acc = tl.zeros([ROWS, COLUMNS], tl.float32)
        for part in range(num_parts):
            acc += tl.load(part_ptrs + part * (ROWS * COLUMNS), cache_modifier=".cg")
    return acc, is_last


def cut_wide(num_rows: int, num_outputs: int, num_inputs: int) -> tuple[int, int]:
    """(rows of a tile, programs that share its inputs)."""
    columns = triton.cdiv(num_outputs, _BLOCK_O)
    num_tiles = triton.cdiv(num_rows, 32) * columns
    if num_tiles > _WAVE:
        return 64, 1
    most = min(_WAVE // num_tiles, num_inputs // _MIN_INPUTS, _MOST_PARTS)
    return 32, 1 << max(most, 1).bit_length() - 1


def wide_linear_triton(x_TI: torch.Tensor, pieces_3OI: torch.Tensor) -> torch.Tensor:
    """`wide_linear_ref` of bfloat16 rows, which may lie apart, and a weight in pieces."""
    num_rows, (_, num_outputs, num_inputs) = len(x_TI), pieces_3OI.shape
    assert x_TI.dtype is pieces_3OI.dtype is torch.bfloat16
    assert x_TI.stride(1) == 1
    assert pieces_3OI.is_contiguous()
    out = x_TI.new_empty((num_rows, num_outputs), dtype=torch.float32)
    overlap = overlaps_launches(x_TI.device)
    block_t, num_parts = cut_wide(num_rows, num_outputs, num_inputs)
    rows, columns = triton.cdiv(num_rows, block_t), triton.cdiv(num_outputs, _BLOCK_O)
    part = out.new_empty(rows * columns * num_parts * block_t * _BLOCK_O if num_parts > 1 else 0)
    _wide_linear_kernel[(rows, columns, num_parts)](
        x_TI,
        pieces_3OI,
        out,
        part,
        arrivals(x_TI.device),
        num_rows,
        num_outputs,
        num_inputs,
        x_TI.stride(0),
        pieces_3OI.stride(0),
        BLOCK_T=block_t,
        BLOCK_O=_BLOCK_O,
        BLOCK_I=_BLOCK_I,
        PDL=overlap,
        num_warps=4,
        num_stages=fitting_stages(3, x_TI.device),  # of four one program fits a multiprocessor
        launch_pdl=overlap,
    )
    return out
