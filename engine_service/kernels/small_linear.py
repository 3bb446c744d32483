"""Linear layers of few rows, where reading the weights is all the time there is.

It chooses the kernel of `few_rows` and its blocks. It knows no modules.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from engine_service.kernels.activation import silu_mul_ref
from engine_service.kernels.few_rows import Tiles, multiply
from engine_service.kernels.jit import runs_triton
from engine_service.kernels.norm import rms_norm, rms_norm_ref

MAX_ROWS = 64
"""Rows up to which the kernels exist; 16 in float32, which tensor cores cannot multiply exactly."""

_NARROW, _HUGE = 4096, 65536
"""Outputs up to which a weight is narrow, and from which the library reads it faster."""
_SHORT = 2048
"""Inputs up to which a product is short, so that what is launched around it counts."""


def choose_tiles(rows: int, out_size: int, in_size: int, dtype: torch.dtype) -> Tiles:
    """The fastest way found on an H200 to multiply `rows` by a weight [out_size, in_size].

    Multiply-adds hold all rows in registers: one row is fastest so, and they are exact in float32.
    Tensor cores take 16 rows in the time of two. What is narrow is split along K to fill the
    device.
    """
    if rows == 1 or dtype is torch.float32:
        block_n = 2 if rows > 4 else 8 if out_size > _NARROW else 4
        return Tiles(block_n, 128 * 16 // dtype.itemsize, num_warps=4)
    split_k = 1 if out_size > _NARROW else 2 if out_size > 2048 else 4
    if rows <= 16:
        return Tiles(64, 256, 4, num_stages=4, split_k=split_k)
    if in_size <= _SHORT < out_size:
        return Tiles(128, 128, 8, num_stages=4, split_k=4 if out_size <= _NARROW else 2)
    return Tiles(64, 128, 4, num_stages=5 if rows <= 32 else 4, split_k=split_k)


def faster_up_to(out_size: int, in_size: int, dtype: torch.dtype) -> int:
    """Rows up to which a weight of this size is read faster here than by the library, the norm,
    activation and sum around it included."""
    if out_size >= _HUGE:
        return 0
    if dtype is torch.float32:
        return 4
    if out_size <= _SHORT:
        return MAX_ROWS
    return 32 if out_size <= _NARROW or in_size <= _SHORT else 16


def small_linear_ref(
    x_MK: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None = None,
    *,
    norm: tuple[torch.Tensor, float] | None = None,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """y = norm(x) W^T + b; gated: silu(first half of y) * second half; residual: residual + y,
    written into `residual`. `norm` is (weight [K], eps); y is written into `out` if there is one
    and no residual."""
    x = x_MK if norm is None else rms_norm_ref(x_MK, *norm)
    y = functional.linear(x, weight_NK, bias_N)
    if gated:
        y = silu_mul_ref(y)
    if residual is not None:
        return residual.add_(y)
    return y if out is None else out.copy_(y)


def prefers_small(x_MK: torch.Tensor, weight_NK: torch.Tensor) -> bool:
    """Whether `small_linear_triton` is faster here than separate operators."""
    return (
        runs_triton(x_MK)
        and 0 < x_MK.shape[0] <= faster_up_to(weight_NK.shape[0], weight_NK.shape[1], x_MK.dtype)
        # Rows of the weight start at 16 bytes, and the compiler can tell.
        and x_MK.shape[1] % 16 == 0
        and weight_NK.is_contiguous()
    )


def small_linear_triton(
    x_MK: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None = None,
    *,
    norm: tuple[torch.Tensor, float] | None = None,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    tiles: Tiles | None = None,
) -> torch.Tensor:
    """`small_linear_ref` of 1 to `MAX_ROWS` rows in one launch (float16 with a norm: maybe two).

    Weight and residual are contiguous. A row's result depends on the other rows only through the
    number of them that the blocks are made for. The norm's factor is applied to the product, so
    fewer roundings happen than in the reference. Launches that split K follow each other: two
    streams of one device cannot share this function. Raises ValueError for what it cannot compute.
    """
    rows, in_size = x_MK.shape
    out_size = weight_NK.shape[0]
    wide = x_MK.dtype is torch.float32
    if not 0 < rows <= (16 if wide else MAX_ROWS) or x_MK.dtype is torch.float64:
        raise ValueError(f"no kernel for {rows} rows of {x_MK.dtype}")
    if not weight_NK.is_contiguous() or (residual is not None and not residual.is_contiguous()):
        raise ValueError("weight and residual must be contiguous")
    tiles = tiles or choose_tiles(rows, out_size, in_size, x_MK.dtype)
    if norm is not None and tiles.num_stages and x_MK.dtype is torch.float16:
        # x g could exceed float16 before the norm's factor brings it back.
        x_MK, norm = rms_norm(x_MK, *norm), None
    if out is None:
        out = x_MK.new_empty(rows, out_size // 2 if gated else out_size)
    out = out if residual is None else residual
    multiply(
        x_MK.contiguous(),
        weight_NK,
        bias_N,
        norm or (None, 0.0),
        out,
        gated=gated,
        residual=residual is not None,
        tiles=tiles,
    )
    return out
