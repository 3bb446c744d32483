"""Products of rows with the weights of one of many experts each, and the weighted sums of their
results. It does not know how experts are chosen.

Shape legend: T tokens, A experts of a token, R = T A rows (row t A + a is token t for its expert
a), X experts, E hidden size, I inner size, W rows of an expert's weight.

A grid has programs for the most tiles there could be (`group_rows`), so that one captured graph
serves every choice of experts. Nothing is added atomically: results repeat bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional

from engine_service.kernels.activation import silu_mul
from engine_service.kernels.group_rows import RowGroups, group_rows_triton
from engine_service.kernels.jit import (
    fitting_stages,
    jit,
    overlaps_launches,
    runs_triton,
    tl,
    triton,
)


@dataclass(frozen=True, slots=True)
class Tiles:
    """How the products are cut. `block_m` and `block_n` are powers of two, 16 at least."""

    block_m: int
    """Rows of a tile, all of one expert."""
    block_n: int
    """Outputs of a program; gated ones need twice as many rows of the weight."""
    block_k: int
    """Inputs that it reads at a time."""
    num_warps: int
    num_stages: int


def choose_tiles(num_rows: int, num_experts: int, dtype: torch.dtype, *, gated: bool) -> Tiles:
    """Small tiles where experts get few rows each and reading weights is all the time there is.
    `block_m` is the same for both products of an expert, whose rows are grouped once."""
    if dtype is torch.float32:
        return Tiles(16, 32, 32, num_warps=4, num_stages=2)
    if num_rows <= 16 * num_experts:
        return Tiles(16, 64, 128, num_warps=4, num_stages=4)
    return Tiles(64, 64 if gated else 128, 64, num_warps=4, num_stages=3)


def grouped_linear_ref(
    x_RI: torch.Tensor, weight_XWI: torch.Tensor, experts_R: torch.Tensor, *, gated: bool = False
) -> torch.Tensor:
    """[R, W]: row r times the weight of expert `experts[r]`; gated: silu(first half) * second
    half, [R, W / 2]. Rows of experts that are not among the X are zero."""
    width = weight_XWI.shape[1] // (2 if gated else 1)
    out = x_RI.new_zeros(x_RI.shape[0], width)
    for expert in experts_R.unique().tolist():
        if not 0 <= expert < len(weight_XWI):
            continue
        rows = (experts_R == expert).nonzero().squeeze(1)
        y = functional.linear(x_RI[rows], weight_XWI[expert])
        out[rows] = silu_mul(y) if gated else y
    return out


def mix_experts_ref(
    residual_TE: torch.Tensor,
    x_TE: torch.Tensor,
    *,
    experts_TA: torch.Tensor,
    shares_TA: torch.Tensor,
    gate_up_XWE: torch.Tensor,
    down_XEI: torch.Tensor,
) -> torch.Tensor:
    """residual + sum over a of shares[t, a] * expert experts[t, a] of x[t], kept in `residual`.

    An expert is down(silu(gate) * up); `gate_up` [X, 2 I, E] holds the gate first. Every product is
    rounded to the format of x, the sum once and in the format of `shares` (float32 at least).
    Experts outside of [0, X) are another rank's: they cost nothing here and add nothing.
    """
    num_tokens, per_token = experts_TA.shape
    experts_R = experts_TA.flatten()
    x_RE = x_TE.repeat_interleave(per_token, dim=0)
    inner_RI = grouped_linear_ref(x_RE, gate_up_XWE, experts_R, gated=True)
    y_RE = grouped_linear_ref(inner_RI, down_XEI, experts_R)
    y_TAE = y_RE.view(num_tokens, per_token, -1).to(shares_TA.dtype)
    return residual_TE.add_((y_TAE * shares_TA.unsqueeze(-1)).sum(dim=1))


def mix_experts(
    residual_TE: torch.Tensor,
    x_TE: torch.Tensor,
    *,
    experts_TA: torch.Tensor,
    shares_TA: torch.Tensor,
    gate_up_XWE: torch.Tensor,
    down_XEI: torch.Tensor,
) -> torch.Tensor:
    """`mix_experts_ref`; four launches or five on CUDA."""
    compute = mix_experts_triton if runs_triton(x_TE) else mix_experts_ref
    return compute(
        residual_TE,
        x_TE,
        experts_TA=experts_TA,
        shares_TA=shares_TA,
        gate_up_XWE=gate_up_XWE,
        down_XEI=down_XEI,
    )


@jit
def _silu_mul(gate: tl.tensor, up: tl.tensor) -> tl.tensor:
    """silu(gate) * up, rounded wherever the plain operators round."""
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    return (silu.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)


@partial(jit, do_not_specialize=["R"])
def _grouped_linear_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    row_ptr: tl.tensor,
    tile_ptr: tl.tensor,
    R: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    X: tl.tensor,
    x_stride: tl.tensor,
    PER_TOKEN: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """A tile of rows times BLOCK_N outputs of its expert; programs side by side share weights."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    tile = tl.program_id(0)
    expert = tl.load(tile_ptr + tile)
    if expert == X:
        return
    row = tl.load(row_ptr + tile * BLOCK_M + tl.arange(0, BLOCK_M))
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)[None, :]
    kept = (row < R)[:, None]
    x_ptrs = x_ptr + (row // PER_TOKEN).to(tl.int64)[:, None] * x_stride + k
    # Past the end the last output repeats.
    weight_row = expert.to(tl.int64) * (2 * N if GATED else N) + tl.minimum(n, N - 1)
    weight_ptrs = weight_ptr + weight_row[:, None] * K + k
    up_ptrs = weight_ptr + (weight_row + N)[:, None] * K + k
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    acc_up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in range(0, K, BLOCK_K):
        inside = start + k < K
        x = tl.trans(tl.load(x_ptrs + start, mask=kept & inside, other=0.0))
        w = tl.load(weight_ptrs + start, mask=inside, other=0.0)
        acc = tl.dot(w, x, acc, input_precision="ieee")
        if GATED:
            w = tl.load(up_ptrs + start, mask=inside, other=0.0)
            acc_up = tl.dot(w, x, acc_up, input_precision="ieee")
    y = acc.to(out_ptr.dtype.element_ty)
    if GATED:
        y = _silu_mul(y, acc_up.to(y.dtype))
    out_ptrs = out_ptr + row.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(out_ptrs, tl.trans(y), mask=kept & (n < N)[None, :])


def grouped_linear_triton(
    x_BK: torch.Tensor,
    weight_XWK: torch.Tensor,
    groups: RowGroups,
    *,
    num_rows: int,
    per_token: int = 1,
    gated: bool = False,
    tiles: Tiles,
) -> torch.Tensor:
    """`grouped_linear_ref` of `num_rows` rows in one launch; row r stands in x[r // per_token].

    `groups` were made with `tiles.block_m`; the weight is contiguous, rows of x may lie apart.
    """
    num_experts, width, depth = weight_XWK.shape
    width = width // 2 if gated else width
    out = x_BK.new_empty(num_rows, width)
    overlap = overlaps_launches(x_BK.device)
    _grouped_linear_kernel[(len(groups.experts), triton.cdiv(width, tiles.block_n))](
        x_BK,
        weight_XWK,
        out,
        groups.rows,
        groups.experts,
        num_rows,
        width,
        depth,
        num_experts,
        x_BK.stride(0),
        PER_TOKEN=per_token,
        GATED=gated,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k,
        PDL=overlap,
        num_warps=tiles.num_warps,
        num_stages=fitting_stages(tiles.num_stages, x_BK.device),
        launch_pdl=overlap,
    )
    return out


@jit
def _weighted_sum_kernel(
    residual_ptr: tl.tensor,
    y_ptr: tl.tensor,
    expert_ptr: tl.tensor,
    share_ptr: tl.tensor,
    residual_stride: tl.tensor,
    X: tl.tensor,
    WIDTH: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    y_ptrs = y_ptr + token * (PER_TOKEN * WIDTH) + column
    total = tl.zeros([BLOCK], tl.float32)
    for one in tl.static_range(PER_TOKEN):
        share = tl.load(share_ptr + token * PER_TOKEN + one)
        expert = tl.load(expert_ptr + token * PER_TOKEN + one)
        here = inside & (expert >= 0) & (expert < X)  # nobody has written y of the others
        total += share * tl.load(y_ptrs + one * WIDTH, mask=here, other=0.0).to(tl.float32)
    places = residual_ptr + token * residual_stride + column
    held = tl.load(places, mask=inside, other=0.0)
    tl.store(places, (held.to(tl.float32) + total).to(held.dtype), mask=inside)


def mix_experts_triton(
    residual_TE: torch.Tensor,
    x_TE: torch.Tensor,
    *,
    experts_TA: torch.Tensor,
    shares_TA: torch.Tensor,
    gate_up_XWE: torch.Tensor,
    down_XEI: torch.Tensor,
    tiles: Tiles | None = None,
) -> torch.Tensor:
    """`mix_experts_ref` in four launches or five. Weights are contiguous, rows of `residual` and x
    may lie apart; shares are float32; float64 is not there."""
    num_tokens, per_token = experts_TA.shape
    num_rows, num_experts, width = experts_TA.numel(), len(gate_up_XWE), residual_TE.shape[1]
    first, second = (
        tiles or choose_tiles(num_rows, num_experts, x_TE.dtype, gated=gated)
        for gated in (True, False)
    )
    groups = group_rows_triton(experts_TA.flatten(), num_experts, first.block_m)
    inner_RI = grouped_linear_triton(
        x_TE, gate_up_XWE, groups, num_rows=num_rows, per_token=per_token, gated=True, tiles=first
    )
    y_RE = grouped_linear_triton(inner_RI, down_XEI, groups, num_rows=num_rows, tiles=second)
    block = min(triton.next_power_of_2(width), 1024)
    overlap = overlaps_launches(x_TE.device)
    _weighted_sum_kernel[(num_tokens, triton.cdiv(width, block))](
        residual_TE,
        y_RE,
        experts_TA.contiguous(),
        shares_TA.contiguous(),
        residual_TE.stride(0),
        num_experts,
        WIDTH=width,
        PER_TOKEN=per_token,
        BLOCK=block,
        PDL=overlap,
        num_warps=max(block // 256, 1),
        launch_pdl=overlap,
    )
    return residual_TE
