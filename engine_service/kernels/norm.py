"""Root-mean-square normalisation (Zhang and Sennrich 2019, arXiv 1910.07467), alone and after a
residual addition. It knows no modules.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from engine_service.kernels.jit import jit, overlaps_launches, runs_triton, tl, triton

_WIDE = (torch.float32, torch.float64)


def rms_norm_ref(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis.

    Statistics are taken in float32 at least; the result is rounded before the weight is applied,
    as the published models were trained.
    """
    wide = x if x.dtype in _WIDE else x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    normed = normed.to(x.dtype)
    return normed if weight is None else weight * normed


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """`rms_norm_ref`: one launch on CUDA, one operator where no rounding in between is at stake.

    On the CPU that operator is nine inside; for [32, 192] five take 20 instead of 23 us.
    """
    if runs_triton(x):
        return rms_norm_triton(x, weight, eps)
    if x.dtype in _WIDE and x.device.type == "cpu":
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        mean_square = torch.addcmul(x.new_full((), eps), length, length, value=1 / x.shape[-1])
        normed = x * mean_square.rsqrt_()
        return normed if weight is None else normed.mul_(weight)
    if x.dtype in _WIDE:
        return functional.rms_norm(x, (x.shape[-1],), weight, eps)
    normed = functional.rms_norm(x, (x.shape[-1],), None, eps)
    return normed if weight is None else weight * normed


def add_rms_norm_ref(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm(x + residual), x + residual)."""
    total = residual + x
    return rms_norm_ref(total, weight, eps), total


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`add_rms_norm_ref`; `residual` is overwritten with the sum."""
    if runs_triton(x):
        return add_rms_norm_triton(x, residual, weight, eps)
    residual.add_(x)
    return rms_norm(residual, weight, eps), residual


@jit
def normed_row(x: tl.tensor, weight: tl.tensor, eps: tl.tensor, WIDTH: tl.constexpr) -> tl.tensor:
    """`rms_norm_ref` of a row, zeros behind its WIDTH elements; weight: of the same length or
    None."""
    wide = x.to(tl.float32)
    y = (wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / WIDTH + eps)).to(x.dtype)
    if weight is not None:
        y = (y.to(tl.float32) * weight.to(tl.float32)).to(x.dtype)
    return y


@jit
def _rms_norm_kernel(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    x_stride: tl.tensor,
    residual_stride: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    weight = None
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0)
    if residual_ptr is not None:
        places = residual_ptr + row * residual_stride + column
        total = x.to(tl.float32) + tl.load(places, mask=inside, other=0.0).to(tl.float32)
        # The statistics are those of the sum as it is stored.
        x = total.to(x.dtype)
        tl.store(places, x, mask=inside)
    tl.store(out_ptr + row * WIDTH + column, normed_row(x, weight, eps, WIDTH), mask=inside)


def rms_norm_triton(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """`rms_norm_ref` in one launch; the last axis of x is contiguous, float64 is not there. The
    weight must have been there before the kernels ahead were launched: it is read early."""
    rows = x.reshape(-1, x.shape[-1])
    out = torch.empty_like(rows, memory_format=torch.contiguous_format)
    _launch(rows, None, weight, out, eps)
    return out.view(x.shape)


def add_rms_norm_triton(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`add_rms_norm_ref` in one launch; `residual` is overwritten with the sum.

    The rows of `residual` are evenly spaced: torch raises where they are not. float64 is not there.
    """
    width = x.shape[-1]
    rows = x.reshape(-1, width)
    out = torch.empty_like(rows, memory_format=torch.contiguous_format)
    _launch(rows, residual.view(-1, width), weight, out, eps)
    return out.view(x.shape), residual


def _launch(
    x_TE: torch.Tensor,
    residual_TE: torch.Tensor | None,
    weight_E: torch.Tensor | None,
    out_TE: torch.Tensor,
    eps: float,
) -> None:
    """One program a row. The split of a row over threads follows from its width alone, so that a
    token's numbers do not depend on how many others share its step."""
    num_rows, width = x_TE.shape
    block = triton.next_power_of_2(width)
    overlap = overlaps_launches(x_TE.device)
    _rms_norm_kernel[(num_rows,)](
        x_TE,
        residual_TE,
        weight_E,
        out_TE,
        x_TE.stride(0),
        0 if residual_TE is None else residual_TE.stride(0),
        eps,
        WIDTH=width,
        BLOCK=block,
        PDL=overlap,
        # 16 elements a thread: two loads of 16 bytes in half formats.
        num_warps=min(max(block // 512, 1), 16),
        launch_pdl=overlap,
    )
