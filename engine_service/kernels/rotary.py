"""Rotary position embedding in the split-halves layout (Su et al. 2021, arXiv 2104.09864).

It does not know where the angles come from.
"""

from __future__ import annotations

import torch


def rotate_ref(x_THD: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor) -> torch.Tensor:
    """x * cos + (-x2, x1) * sin, where x1 and x2 are the halves of the last axis."""
    first, second = x_THD.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return x_THD * cos_TD.unsqueeze(1) + turned * sin_TD.unsqueeze(1)


def rotate(
    x_THD: torch.Tensor, cos_T1D: torch.Tensor, signed_sin_T1D: torch.Tensor
) -> torch.Tensor:
    """`rotate_ref` in three operators: the sign of the turned half sits in the table, whose first
    half is -sin, so that turning is a plain roll."""
    turned = x_THD.roll(x_THD.shape[-1] // 2, dims=-1)
    return torch.addcmul(x_THD * cos_T1D, turned, signed_sin_T1D)
