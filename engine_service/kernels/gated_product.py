"""A product with its gate inside, by QuACK's kernel for Hopper (Dao and others, CuTe DSL), which
FlashAttention 4 brings along.

The library writes gate and up, and a kernel behind it reads them again: at 8,192 rows of an 8B
model 600 MB more, and energy, by which long products are timed. This kernel holds both in
registers. It rounds once what those round three times.

It compiles when a tile is first needed, some 2 s, and keeps that on disk. It knows no modules.
Shapes: M rows, N outputs (gate, then up), K inputs.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import NamedTuple

import torch

from engine_service.kernels.jit import in_one_line
from engine_service.kernels.waves import filled

_LOG = logging.getLogger("tidemill.rank")

_HOPPER = 9
_LEAST_ROWS = 128
"""Fewer are not tried: reading the weights is all, and a tile has as many rows."""
_MANY_ROWS = 1024
_LEAST_FILLED = 0.7
"""Of the device. What leaves more of it idle the library cuts better."""
_AS_GOOD = 0.025
"""Less of the device than the fullest: the order below says more than that."""


class GatedTile(NamedTuple):
    """What a multiprocessor computes at a time."""

    rows: int
    outputs: int
    pingpong: bool
    """Whether two warp groups take turns, one multiplying while the other gates and writes; else
    both share a tile."""
    cluster: tuple[int, int]
    """Tiles that load together, by rows and by outputs."""


_FEW = (
    GatedTile(128, 192, True, (1, 2)),
    GatedTile(128, 256, False, (1, 1)),
    GatedTile(128, 160, True, (1, 1)),
    GatedTile(128, 128, True, (1, 1)),
)
"""Up to `_MANY_ROWS`, the fastest first of those that fill the device equally well."""
_MANY = (
    GatedTile(256, 192, False, (2, 1)),
    GatedTile(128, 256, False, (2, 1)),
    GatedTile(256, 160, False, (1, 2)),
)


def gated_product(
    x_MK: torch.Tensor, weight_NK: torch.Tensor, out_MG: torch.Tensor | None = None
) -> torch.Tensor | None:
    """silu(x Wg^T) * (x Wu^T) [M, N / 2], in `out` where that is given; None where this kernel is
    not there, or not the one to take."""
    quack = _open(x_MK.device) if x_MK.is_cuda else None
    if quack is None or x_MK.dtype not in (torch.bfloat16, torch.float16):
        return None
    tile = choose_tile(len(x_MK), len(weight_NK), quack.num_sms)
    out_MG = x_MK.new_empty(len(x_MK), len(weight_NK) // 2) if out_MG is None else out_MG
    if tile is None or not _fit(x_MK, weight_NK, out_MG):
        return None
    return out_MG if quack.multiply(tile, x_MK, weight_NK, out_MG) else None


@lru_cache(maxsize=4096)
def choose_tile(num_rows: int, out_size: int, num_sms: int) -> GatedTile | None:
    """The first that fills the device as well as any; None: the library's product and a gate take
    no longer."""
    if num_rows < _LEAST_ROWS:
        return None
    tiles = _FEW if num_rows <= _MANY_ROWS else _MANY
    shares = [filled(tile, num_rows, out_size, num_sms) for tile in tiles]
    least = max(_LEAST_FILLED, max(shares) - _AS_GOOD)
    return next((tile for tile, share in zip(tiles, shares, strict=True) if share >= least), None)


class _Quack:
    """The kernel on one device."""

    def __init__(self, num_sms: int) -> None:
        """Raises ImportError."""
        from quack.gemm_config import GemmConfig
        from quack.gemm_interface import gemm_gated

        self.num_sms = num_sms
        self._gemm_gated = gemm_gated
        # It knows a configuration again by its identity.
        self._configs = {
            tile: GemmConfig(
                tile_m=tile.rows,
                tile_n=tile.outputs,
                pingpong=tile.pingpong,
                cluster_m=tile.cluster[0],
                cluster_n=tile.cluster[1],
                is_dynamic_persistent=False,
                device_capacity=_HOPPER,
            )
            for tile in (*_FEW, *_MANY)
        }

    def multiply(
        self, tile: GatedTile, x_MK: torch.Tensor, weight_NK: torch.Tensor, out_MG: torch.Tensor
    ) -> bool:
        """Whether `out` is written. What fails once is not tried again."""
        config = self._configs.get(tile)
        if config is None:
            return False
        try:
            self._gemm_gated(
                x_MK,
                weight_NK.t(),
                activation="swiglu",
                postact_out=out_MG,
                store_preact=False,
                concat_layout=("B",),
                config=config,
            )
        except Exception as error:
            del self._configs[tile]
            _LOG.warning(
                "QuACK's gated product failed and its tiles of %d x %d are off from now on, the"
                " library multiplies: %s",
                tile.rows,
                tile.outputs,
                in_one_line(error),
            )
            return False
        return True


@lru_cache(maxsize=64)
def _open(device: torch.device) -> _Quack | None:
    """None on other devices than Hopper's, and where it is not installed."""
    if torch.cuda.get_device_capability(device)[0] != _HOPPER:
        return None
    try:
        return _Quack(torch.cuda.get_device_properties(device).multi_processor_count)
    except ImportError:
        return None


def _fit(x_MK: torch.Tensor, weight_NK: torch.Tensor, out_MG: torch.Tensor) -> bool:
    """Whether the kernel, which loads and stores 16 bytes at a time, reads and writes them as they
    lie."""
    tensors = (x_MK, weight_NK, out_MG)
    one_kind = len({(one.dtype, one.device) for one in tensors}) == 1
    in_eights = all(not one.shape[1] % 8 for one in tensors)
    return (
        one_kind
        and in_eights
        and all(one.is_contiguous() and not one.data_ptr() % 16 for one in tensors)
    )
