"""Rotary position embedding in the split-halves layout (Su et al. 2021, arXiv 2104.09864).

It does not know where the frequencies come from. On CUDA the rotation itself is part of
qk_rope_store.py.
"""

from __future__ import annotations

import torch

from engine_service.kernels.jit import INTERPRETED, jit, overlaps_launches, runs_triton, tl, triton


def rotate_ref(x_THD: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor) -> torch.Tensor:
    """x * cos + (-x2, x1) * sin, where x1 and x2 are the halves of the last axis."""
    first, second = x_THD.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return x_THD * cos_TD.unsqueeze(1) + turned * sin_TD.unsqueeze(1)


def rotate(
    x_THD: torch.Tensor, cos_T1D: torch.Tensor, signed_sin_T1D: torch.Tensor
) -> torch.Tensor:
    """`rotate_ref` in three operators: the sign of the turned half sits in the table, whose first
    half is -sin, so that turning is a plain roll. Features behind the tables' last stay."""
    rotary_dim = cos_T1D.shape[-1]
    if rotary_dim < x_THD.shape[-1]:
        leading = rotate(x_THD[..., :rotary_dim], cos_T1D, signed_sin_T1D)
        return torch.cat((leading, x_THD[..., rotary_dim:]), dim=-1)
    turned = x_THD.roll(rotary_dim // 2, dims=-1)
    return torch.addcmul(x_THD * cos_T1D, turned, signed_sin_T1D)


def rotary_angles_ref(
    positions_T: torch.Tensor, frequencies: torch.Tensor, factor: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """([T, 1, D] cos, [T, 1, D] sin with its first half negated) times `factor`, for `rotate`.

    `frequencies` [D / 2] float32, in radians a position; angles are float32, the result is `dtype`.
    """
    angles = positions_T.to(torch.float32)[:, None, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    if factor != 1.0:
        cos, sin = cos * factor, sin * factor
    cos = torch.cat((cos, cos), dim=-1).to(dtype)
    return cos, torch.cat((-sin, sin), dim=-1).to(dtype)


def rotary_angles(
    positions_T: torch.Tensor, frequencies: torch.Tensor, factor: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rotary_angles_ref`; one launch on CUDA."""
    compute = rotary_angles_triton if runs_triton(positions_T) else rotary_angles_ref
    return compute(positions_T, frequencies, factor, dtype)


@jit
def _rotary_angles_kernel(
    position_ptr: tl.tensor,
    frequency_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    factor: tl.tensor,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    column = tl.arange(0, BLOCK)
    inside = column < HALF
    frequency = tl.load(frequency_ptr + column, mask=inside, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    angle = tl.load(position_ptr + row).to(tl.float32) * frequency
    if INTERPRETED:
        cos, sin = tl.cos(angle), tl.sin(angle)
    else:
        # tl.cos is the instruction without range reduction: useless at a million radians.
        cos, sin = tl.extra.cuda.libdevice.cos(angle), tl.extra.cuda.libdevice.sin(angle)
    cos, sin = cos * factor, sin * factor
    first = row * (2 * HALF) + column
    tl.store(cos_ptr + first, cos, mask=inside)
    tl.store(cos_ptr + first + HALF, cos, mask=inside)
    tl.store(sin_ptr + first, -sin, mask=inside)
    tl.store(sin_ptr + first + HALF, sin, mask=inside)


def rotary_angles_triton(
    positions_T: torch.Tensor, frequencies: torch.Tensor, factor: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rotary_angles_ref` in one launch."""
    num_tokens, half = len(positions_T), len(frequencies)
    tables = torch.empty(2, num_tokens, 1, 2 * half, dtype=dtype, device=positions_T.device)
    cos, signed_sin = tables
    overlap = overlaps_launches(positions_T.device)
    _rotary_angles_kernel[(num_tokens,)](
        positions_T.contiguous(),
        frequencies,
        cos,
        signed_sin,
        factor,
        HALF=half,
        BLOCK=triton.next_power_of_2(half),
        INTERPRETED=INTERPRETED,
        PDL=overlap,
        num_warps=1,
        launch_pdl=overlap,
    )
    return cos, signed_sin
