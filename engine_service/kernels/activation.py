"""Gated activations of feed-forward layers (Shazeer 2020, arXiv 2002.05202).

It knows no modules.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from engine_service.kernels.jit import jit, overlaps_launches, runs_triton, tl, triton


def silu_mul_ref(gate_up_TI: torch.Tensor) -> torch.Tensor:
    """[T, 2 I] to [T, I]: gate * sigmoid(gate) * up; the gate comes first."""
    gate, up = gate_up_TI.chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up


def silu_mul(gate_up_TI: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """`silu_mul_ref` with one rounding of silu and one of the product, in `out` if there is one
    (contiguous); one launch on CUDA."""
    if runs_triton(gate_up_TI):
        return silu_mul_triton(gate_up_TI, out)
    gate, up = gate_up_TI.chunk(2, dim=-1)
    silu = functional.silu(gate)
    return silu.mul_(up) if out is None else torch.mul(silu, up, out=out)


@jit
def _silu_mul_kernel(
    gate_up_ptr: tl.tensor,
    out_ptr: tl.tensor,
    stride: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    gates = gate_up_ptr + row * stride + column
    gate = tl.load(gates, mask=inside, other=0.0)
    up = tl.load(gates + WIDTH, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    y = (silu.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)
    tl.store(out_ptr + row * WIDTH + column, y, mask=inside)


def silu_mul_triton(gate_up_TI: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """`silu_mul` in one launch; rows may lie apart, float64 is not there. Raises ValueError for an
    `out` of another size."""
    num_rows, width = gate_up_TI.shape[0], gate_up_TI.shape[1] // 2
    if out is None:
        out = gate_up_TI.new_empty(num_rows, width)
    elif out.shape != (num_rows, width) or not out.is_contiguous():
        raise ValueError(f"no room for {num_rows} x {width} in {tuple(out.shape)}")
    # Few rows want many programs, many rows want more bytes under way in each.
    block = min(triton.next_power_of_2(width), 2048 if num_rows >= 256 else 1024)
    overlap = overlaps_launches(gate_up_TI.device)
    _silu_mul_kernel[(num_rows, triton.cdiv(width, block))](
        gate_up_TI,
        out,
        gate_up_TI.stride(0),
        WIDTH=width,
        BLOCK=block,
        PDL=overlap,
        num_warps=max(block // 256, 1),  # 8 elements a thread: 16 bytes in half formats
        launch_pdl=overlap,
    )
    return out
