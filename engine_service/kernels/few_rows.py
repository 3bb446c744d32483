"""Triton kernels for products of few rows with a large weight: one of plain multiply-adds, one of
tensor cores. They know neither how their blocks are chosen nor what the product is for.

Both read every weight once. A program owns BLOCK_N rows of `weight` [N, K] and all M rows of `x`
[M, K]; everything is contiguous. With GATED its weight rows alternate between gate and up, so that
both ends of a pair meet in one program.

RMS statistics need no pass of their own: with g the norm's weight,
norm(x) W^T = ((x g) W^T) / sqrt(mean(x^2) + eps), and the squares are summed as x streams by.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from engine_service.kernels.arrivals import arrivals, came_last
from engine_service.kernels.jit import fitting_stages, jit, overlaps_launches, tl, triton

_PREFETCH = 32 << 10
"""Bytes of weights that a program draws into the L2 cache before its input is there. The programs
that run at once, two or three a processor, then fill a quarter of an H200's."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """How a product is cut for one of the two kernels."""

    block_n: int
    """Rows of the weight in a program; even."""
    block_k: int
    """Columns that it reads at a time."""
    num_warps: int
    num_stages: int = 0
    """Depth of the pipeline to the tensor cores; 0 takes plain multiply-adds instead."""
    split_k: int = 1
    """Programs that share the columns of a row; only with tensor cores."""


def multiply(
    x_MK: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None,
    norm: tuple[torch.Tensor | None, float],
    out: torch.Tensor,
    *,
    gated: bool,
    residual: bool,
    tiles: Tiles,
) -> None:
    """out = norm(x) W^T + b, gated or added to what `out` holds, in one launch.

    Everything is contiguous. Launches that split K follow each other on a device: they share
    counters. float32 is exact in both kernels, and fast in the multiply-adds alone.
    """
    rows, (num_rows, width) = x_MK.shape[0], weight_NK.shape
    norm_K, eps = norm
    overlap = overlaps_launches(x_MK.device)
    grid = (triton.cdiv(num_rows, tiles.block_n), tiles.split_k)
    options: dict[str, Any] = {
        "GATED": gated,
        "RESIDUAL": residual,
        # Tensor cores are half as fast with fewer columns than 16, which cost nothing.
        "BLOCK_M": max(triton.next_power_of_2(rows), 16 if tiles.num_stages else 1),
        "BLOCK_N": tiles.block_n,
        "BLOCK_K": tiles.block_k,
        "PDL": overlap,
        "num_warps": tiles.num_warps,
        "launch_pdl": overlap,
    }
    tensors, sizes = (x_MK, weight_NK, norm_K, bias_N, out), (rows, num_rows, width, eps)
    if not tiles.num_stages:
        # Which product of a sum is fused, and so not rounded, would differ from row to row; those
        # of bfloat16 are exact.
        options["enable_fp_fusion"] = x_MK.dtype is torch.bfloat16
        _fma_kernel[grid](*tensors, *sizes, **options)
        return
    stages = fitting_stages(tiles.num_stages, out.device)
    options |= {"BLOCK_M": max(options["BLOCK_M"], 8), "num_stages": stages}
    options |= {"SPLIT_K": tiles.split_k, "PREFETCH": _prefetched(weight_NK, tiles)}
    partial = arrived = None
    if tiles.split_k > 1:
        size = grid[0] * tiles.split_k * (tiles.block_n + 1) * options["BLOCK_M"]
        partial = torch.empty(size, dtype=torch.float32, device=out.device)
        arrived = arrivals(out.device)[: grid[0]]
    _dot_kernel[grid](*tensors, partial, arrived, *sizes, **options)


def _prefetched(weight_NK: torch.Tensor, tiles: Tiles) -> int:
    """Bytes of every weight row to prefetch: a multiple of 16 within the shortest part of K."""
    width = weight_NK.shape[1]
    length = triton.cdiv(triton.cdiv(width, tiles.block_k), tiles.split_k) * tiles.block_k
    shortest = max(width - length * (tiles.split_k - 1), 0) * weight_NK.itemsize
    aligned = width * weight_NK.itemsize % 16 == 0 and weight_NK.data_ptr() % 16 == 0
    return min(shortest, _PREFETCH // tiles.block_n) // 16 * 16 if aligned else 0


@jit
def _weight_rows(
    tile: tl.tensor, N: tl.tensor, BLOCK_N: tl.constexpr, GATED: tl.constexpr
) -> tl.tensor:
    """[BLOCK_N] int64 rows of the weight that a tile owns; past the end the last one repeats."""
    row = tl.minimum(tile * BLOCK_N + tl.arange(0, BLOCK_N), N - 1)
    if GATED:
        row = row // 2 + (row % 2) * (N // 2)
    return row.to(tl.int64)


@jit
def _sum_vectors(x: tl.tensor, VECTOR: tl.constexpr) -> tl.tensor:
    """[..., K] to [..., K / VECTOR]: sums of the neighbours that one thread holds."""
    PARTS: tl.constexpr = x.shape[-1] // VECTOR
    shape: tl.constexpr = x.shape[:-1] + (PARTS, VECTOR)  # noqa: RUF005 - Triton knows no star
    return tl.sum(tl.reshape(x, shape), axis=len(x.shape))


@jit
def _weighted(
    x: tl.tensor, norm_ptrs: tl.tensor, inside: tl.tensor, VECTOR: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """(x g, partial sums of x^2) of a float32 tile [..., K]."""
    g = tl.load(norm_ptrs, mask=inside, other=0.0).to(tl.float32)
    return x * g, _sum_vectors(x * x, VECTOR)


@jit
def _store(
    y: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GATED: tl.constexpr,
    RESIDUAL: tl.constexpr,
) -> None:
    """Bias, gate and residual of a float32 tile [BLOCK_M, BLOCK_N], rounded wherever the plain
    operators round."""
    tile = tl.program_id(0)
    dtype = out_ptr.dtype.element_ty
    if bias_ptr is not None:
        rows = _weight_rows(tile, N, BLOCK_N, GATED)
        y += tl.load(bias_ptr + rows).to(tl.float32)[None, :]
    y = y.to(dtype)
    if GATED:
        gate, up = tl.split(tl.reshape(y, [BLOCK_M, BLOCK_N // 2, 2]))
        wide = gate.to(tl.float32)
        silu = (wide / (1.0 + tl.exp(-wide))).to(dtype)
        y = (silu.to(tl.float32) * up.to(tl.float32)).to(dtype)
    FOLD: tl.constexpr = 2 if GATED else 1
    m = tl.arange(0, BLOCK_M)[:, None]
    n = (tile * (BLOCK_N // FOLD) + tl.arange(0, BLOCK_N // FOLD))[None, :]
    inside = (m < M) & (n < N // FOLD)
    out_ptrs = out_ptr + m.to(tl.int64) * (N // FOLD) + n
    if RESIDUAL:
        held = tl.load(out_ptrs, mask=inside, other=0.0)
        y = (held.to(tl.float32) + y.to(tl.float32)).to(dtype)
    tl.store(out_ptrs, y, mask=inside)


@jit
def _fma_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    eps: tl.tensor,
    GATED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Multiply-adds in registers. All threads lie along K, each with 16 bytes of every row: loads
    are wide, a loaded x serves BLOCK_N weights, and threads meet only once, at the end. One tile of
    weights is on its way while another is used; the first is asked for before the wait."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    VECTOR: tl.constexpr = 128 // weight_ptr.dtype.element_ty.primitive_bitwidth
    rows = _weight_rows(tl.program_id(0), N, BLOCK_N, GATED)[None, :, None]
    m = tl.arange(0, BLOCK_M)[:, None, None]
    k = tl.arange(0, BLOCK_K)[None, None, :]
    weight_ptrs = weight_ptr + rows * K + k
    w = tl.load(weight_ptrs, mask=k < K, other=0.0, eviction_policy="evict_first")
    if PDL:
        tl.extra.cuda.gdc_wait()
    acc = tl.zeros([BLOCK_M, BLOCK_N, BLOCK_K // VECTOR], tl.float32)
    squares = tl.zeros([BLOCK_M, 1, BLOCK_K // VECTOR], tl.float32)
    for start in range(0, K, BLOCK_K):
        at = start + k
        ahead = tl.load(
            weight_ptrs + start + BLOCK_K,
            mask=at < K - BLOCK_K,
            other=0.0,
            eviction_policy="evict_first",
        )
        x = tl.load(x_ptr + m * K + at, mask=(m < M) & (at < K), other=0.0).to(tl.float32)
        if norm_ptr is not None:
            x, more = _weighted(x, norm_ptr + at, at < K, VECTOR)
            squares += more
        acc += _sum_vectors(w.to(tl.float32) * x, VECTOR)
        w = ahead
    y = tl.sum(acc, axis=2)
    if norm_ptr is not None:
        y *= tl.rsqrt(tl.sum(squares, axis=2) / K + eps)
    _store(y, bias_ptr, out_ptr, M, N, BLOCK_M, BLOCK_N, GATED, RESIDUAL)


@jit
def _await_input(weight_ptrs: tl.tensor, PREFETCH: tl.constexpr) -> None:
    """Waits for the kernel ahead, while PREFETCH bytes behind every pointer go to the L2 cache."""
    tl.extra.cuda.gdc_launch_dependents()
    if PREFETCH:
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
            "=r,l,r",
            [weight_ptrs.to(tl.uint64), tl.full(weight_ptrs.shape, PREFETCH, tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    tl.extra.cuda.gdc_wait()


@jit
def _sum_parts(
    acc: tl.tensor,
    squares: tl.tensor,
    partial_ptr: tl.tensor,
    arrived_ptr: tl.tensor,
    SPLIT_K: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """(acc [N, M] and squares [M] summed over the parts of K, whether this program came last).

    Every program leaves its part in `partial` [tiles, SPLIT_K, N + 1, M]. The last one adds all in
    their order, whichever it is, so the result never changes.
    """
    tile = tl.program_id(0)
    ROWS: tl.constexpr = acc.shape[0]
    COLUMNS: tl.constexpr = acc.shape[1]
    SIZE: tl.constexpr = (ROWS + 1) * COLUMNS
    m = tl.arange(0, COLUMNS)
    square_ptrs = partial_ptr + tile * (SPLIT_K * SIZE) + m
    acc_ptrs = square_ptrs[None, :] + (1 + tl.arange(0, ROWS))[:, None] * COLUMNS
    own = tl.program_id(1) * SIZE
    tl.store(square_ptrs + own, squares, cache_modifier=".cg")
    tl.store(acc_ptrs + own, acc, cache_modifier=".cg")
    last = came_last(arrived_ptr + tile, SPLIT_K)
    if last:
        acc = tl.zeros([ROWS, COLUMNS], tl.float32)
        squares = tl.zeros([COLUMNS], tl.float32)
        for part in tl.static_range(SPLIT_K):
            squares += tl.load(square_ptrs + part * SIZE, cache_modifier=".cg")
            acc += tl.load(acc_ptrs + part * SIZE, cache_modifier=".cg")
    return acc, squares, last


@jit
def _dot_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    arrived_ptr: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    eps: tl.tensor,
    GATED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Tensor cores; weights pass through a pipeline in shared memory, and before the wait PREFETCH
    bytes of every row go to the L2 cache. Each of SPLIT_K programs takes a part of K."""
    length = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT_K) * BLOCK_K
    first = tl.program_id(1) * length
    rows = _weight_rows(tl.program_id(0), N, BLOCK_N, GATED)[:, None]
    if PDL:
        _await_input(weight_ptr + rows * K + first, PREFETCH)
    VECTOR: tl.constexpr = 128 // weight_ptr.dtype.element_ty.primitive_bitwidth
    m = tl.arange(0, BLOCK_M)[:, None]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    squares = tl.zeros([BLOCK_M, BLOCK_K // VECTOR], tl.float32)
    for start in range(first, tl.minimum(first + length, K), BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)[None, :]
        w = tl.load(weight_ptr + rows * K + k, mask=k < K, other=0.0)
        x = tl.load(x_ptr + m * K + k, mask=(m < M) & (k < K), other=0.0)
        if norm_ptr is not None:
            wide, more = _weighted(x.to(tl.float32), norm_ptr + k, k < K, VECTOR)
            squares += more
            x = wide.to(x.dtype)
        acc = tl.dot(w, tl.trans(x), acc, input_precision="ieee")
    squares_M = tl.sum(squares, axis=1)
    last = True
    if SPLIT_K > 1:
        acc, squares_M, last = _sum_parts(acc, squares_M, partial_ptr, arrived_ptr, SPLIT_K)
    if last:
        y = tl.trans(acc)
        if norm_ptr is not None:
            y *= tl.rsqrt(squares_M / K + eps)[:, None]
        _store(y, bias_ptr, out_ptr, M, N, BLOCK_M, BLOCK_N, GATED, RESIDUAL)
