"""Products that are the library's, by a kernel of it that is chosen here.

cuBLAS guesses which of its kernels is fastest. On an H200 it splits the inputs of narrow weights at
few rows, or leaves half of the device idle: 3 to 25 % slower than what `choose_cut` finds in the
same library. Long prompts it guesses well enough: their time is energy, whatever the kernel
(docs/performance.md).

Kernels that do not split the inputs add in one order, so such a choice changes no number. It knows
no modules. Shapes: M rows, N outputs, K inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch.nn import functional

from engine_service.kernels.cublaslt import Cut, Product, open_library
from engine_service.kernels.waves import count_tiles, filled

_FEW_ROWS, _NARROW = 256, 5120
"""Rows and outputs up to which one wave of tiles computes a product."""
_ONE_WAVE = (
    Cut(64, 16, option=1),
    Cut(64, 32, option=1),
    Cut(128, 16, option=1),
    Cut(64, 64, option=8),
    Cut(128, 32, option=1),
    Cut(80, 64, option=8),
    Cut(96, 64, option=8),
    Cut(64, 128, option=8),
    Cut(128, 64, option=8),
    Cut(96, 128, option=8),
)
_WAVES = (Cut(128, 128, option=8), Cut(192, 64, option=8))
_LEAST_ROWS, _WIDE = 100, 32768
"""Of several waves. With fewer rows or more outputs reading the weights is all, which the library
does well."""
_LEAST_ONE, _LEAST_FILLED = 0.45, 0.93
"""Of the device, in one wave and in several."""


def library_linear(
    x_MK: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """x W^T + b [M, N], in `out` where that is given; `residual`: that plus residual, written into
    `residual`."""
    product = _product_of(x_MK, weight_NK) if bias_N is None and x_MK.is_cuda else None
    if product is not None:
        adds = residual is not None
        target = residual if residual is not None else out
        if target is None:
            target = x_MK.new_empty(x_MK.shape[0], weight_NK.shape[0])
        if _fit(x_MK, weight_NK, target) and product(x_MK, weight_NK, target, adds=adds):
            return target
    if residual is not None:
        if bias_N is not None:
            residual += bias_N
        return residual.addmm_(x_MK, weight_NK.t())
    if out is None:
        return functional.linear(x_MK, weight_NK, bias_N)
    y = torch.mm(x_MK, weight_NK.t(), out=out)
    return y if bias_N is None else y.add_(bias_N)


def choose_cut(num_rows: int, out_size: int, num_sms: int) -> Cut | None:
    """The kernel for a product of these sizes; None: the library chooses well enough.

    Few rows of narrow weights: the smallest tiles of which the device holds all at once. Of wider
    ones: tiles that leave little of it idle in their last wave.
    """
    cuts: Sequence[Cut] = ()
    least = _LEAST_FILLED
    if num_rows <= _FEW_ROWS and out_size <= _NARROW:
        whole = [cut for cut in _ONE_WAVE if count_tiles(cut, num_rows, out_size) <= num_sms]
        cuts, least = sorted(whole, key=lambda cut: _room(cut, num_rows))[:1], _LEAST_ONE
    elif _LEAST_ROWS <= num_rows <= _FEW_ROWS and out_size <= _WIDE:
        cuts = _WAVES
    filling = (cut for cut in cuts if filled(cut, num_rows, out_size, num_sms) >= least)
    return next(filling, None)


def _room(cut: Cut, num_rows: int) -> tuple[int, int, int]:
    """Size of a tile; of equal ones those first that pad least, then those that load least."""
    padded = -(-num_rows // cut.rows) * cut.rows
    return cut.outputs * cut.rows, padded, cut.outputs + cut.rows


def _product_of(x_MK: torch.Tensor, weight_NK: torch.Tensor) -> Product | None:
    return _find_product(x_MK.device, x_MK.dtype, x_MK.shape[0], *weight_NK.shape)


@lru_cache(maxsize=4096)
def _find_product(
    device: torch.device, dtype: torch.dtype, num_rows: int, out_size: int, in_size: int
) -> Product | None:
    """Of the kernel that is chosen; None where the library chooses, or has no such kernel."""
    library = open_library(device)
    if library is None or not num_rows or out_size % 8 or in_size % 8:
        return None
    cut = choose_cut(num_rows, out_size, library.num_sms)
    return None if cut is None else library.product(cut, dtype, num_rows, out_size, in_size)


def _fit(x_MK: torch.Tensor, weight_NK: torch.Tensor, out_MN: torch.Tensor) -> bool:
    """Whether the library, which takes addresses, can read and write them as they lie."""
    one_kind = x_MK.dtype == weight_NK.dtype == out_MN.dtype
    one_place = x_MK.device == weight_NK.device == out_MN.device
    sizes = x_MK.shape[1] == weight_NK.shape[1] and out_MN.shape == (len(x_MK), len(weight_NK))
    tensors = (x_MK, weight_NK, out_MN)
    lie_well = all(one.is_contiguous() and not one.data_ptr() % 16 for one in tensors)
    return one_kind and one_place and sizes and lie_well
