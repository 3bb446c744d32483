"""A product with what stands around it: the norm of its input, the gate of its output, or the sum
that it is added to.

Few rows take one launch of `small_linear`, all others the library's product between separate
kernels, and many with a gate `gated_product`. It knows no modules. Shapes: M rows, N outputs, K
inputs.
"""

from __future__ import annotations

import torch

from engine_service.kernels.activation import silu_mul
from engine_service.kernels.gated_product import gated_product
from engine_service.kernels.library_linear import library_linear
from engine_service.kernels.norm import rms_norm
from engine_service.kernels.small_linear import prefers_small, small_linear_triton


def linear(
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
    written into `residual`. `norm` is (weight [K], eps); y is written into `out` if there is one,
    without residual."""
    if prefers_small(x_MK, weight_NK):
        return small_linear_triton(
            x_MK, weight_NK, bias_N, norm=norm, gated=gated, residual=residual, out=out
        )
    x = x_MK if norm is None else rms_norm(x_MK, *norm)
    if not gated:
        return library_linear(x, weight_NK, bias_N, out=out, residual=residual)
    y = gated_product(x, weight_NK, out) if bias_N is None else None
    return silu_mul(library_linear(x, weight_NK, bias_N), out) if y is None else y
