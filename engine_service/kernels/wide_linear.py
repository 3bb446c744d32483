"""Products of bfloat16 rows with a float32 weight, as exact as float32 has them.

Tensor cores multiply bfloat16. A float32 number is the sum of three bfloat16 numbers, each the
rounding of what the ones before leave, and their products with a bfloat16 number are exact in
float32: three products on tensor cores are one in float32, at a multiple of its rate (as in
Markidis et al. 2018, arXiv 1803.04014, with two halves). It does not know what is multiplied.
Shape legend: T rows, I inputs, O outputs.
"""

from __future__ import annotations

from functools import partial

import torch
from torch.nn import functional

from engine_service.kernels.jit import (
    fitting_stages,
    jit,
    overlaps_launches,
    runs_triton,
    tl,
    triton,
)

MIN_ROWS = 256
"""Fewer rows do not fill the device with tiles."""
_BLOCK_T, _BLOCK_O, _BLOCK_I = 64, 64, 64


def wide_linear_ref(x_TI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
    """[T, O] x W^T in the format of the weight."""
    return functional.linear(x_TI.to(weight_OI.dtype), weight_OI)


def wide_linear(x_TI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
    """`wide_linear_ref`; one launch for many bfloat16 rows on CUDA."""
    splits = x_TI.dtype is torch.bfloat16 and weight_OI.dtype is torch.float32
    if splits and len(x_TI) >= MIN_ROWS and runs_triton(x_TI):
        return wide_linear_triton(x_TI, weight_OI)
    return wide_linear_ref(x_TI, weight_OI)


@partial(jit, do_not_specialize=["num_rows"])
def _wide_linear_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_outputs: tl.tensor,
    num_inputs: tl.tensor,
    x_stride: tl.tensor,
    BLOCK_T: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """A program computes BLOCK_O outputs of BLOCK_T rows."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    out = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    column = tl.arange(0, BLOCK_I)[None, :]
    x_ptrs = x_ptr + row.to(tl.int64)[:, None] * x_stride + column
    weight_ptrs = weight_ptr + out[:, None] * num_inputs + column
    acc = tl.zeros([BLOCK_O, BLOCK_T], tl.float32)
    for start in range(0, num_inputs, BLOCK_I):
        inside = start + column < num_inputs
        x = tl.trans(tl.load(x_ptrs + start, mask=(row < num_rows)[:, None] & inside, other=0.0))
        w = tl.load(weight_ptrs + start, mask=(out < num_outputs)[:, None] & inside, other=0.0)
        high = w.to(tl.bfloat16)
        rest = w - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        # What is small first; and each tile's sum by itself, because tensor cores cut what they add
        # where float32 rounds: over all inputs that is ten times the error of float32.
        part = tl.dot(low, x)
        part = tl.dot(middle, x, part)
        acc += tl.dot(high, x, part)
    out_ptrs = out_ptr + row.to(tl.int64)[:, None] * num_outputs + out[None, :]
    tl.store(out_ptrs, tl.trans(acc), mask=(row < num_rows)[:, None] & (out < num_outputs)[None, :])


def wide_linear_triton(x_TI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
    """`wide_linear_ref` of bfloat16 rows, which may lie apart, and a contiguous float32 weight."""
    num_rows, num_outputs = len(x_TI), len(weight_OI)
    assert x_TI.dtype is torch.bfloat16
    assert weight_OI.dtype is torch.float32
    assert x_TI.stride(1) == 1
    assert weight_OI.is_contiguous()
    out = weight_OI.new_empty((num_rows, num_outputs))
    overlap = overlaps_launches(x_TI.device)
    _wide_linear_kernel[(triton.cdiv(num_rows, _BLOCK_T), triton.cdiv(num_outputs, _BLOCK_O))](
        x_TI,
        weight_OI,
        out,
        num_rows,
        num_outputs,
        weight_OI.shape[1],
        x_TI.stride(0),
        BLOCK_T=_BLOCK_T,
        BLOCK_O=_BLOCK_O,
        BLOCK_I=_BLOCK_I,
        PDL=overlap,
        num_warps=4,
        num_stages=fitting_stages(4, x_TI.device),
        launch_pdl=overlap,
    )
    return out
