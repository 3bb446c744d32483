"""A product with its gate inside, by QuACK's kernel for Hopper (Dao and others, CuTe DSL), which
FlashAttention 4 brings along.

The library writes gate and up, and a kernel behind it reads them again: at 8,192 rows of an 8B
model 800 MB more, and energy, by which long products are timed. This kernel holds both in
registers. It rounds once what those round three times.

Its tiles compile when it is first asked, some 2 s each, and are kept on disk; what fails then, or
is wrong, is told and left to the library. It knows no modules.
Shapes: M rows, N outputs (gate, then up), G = N / 2, K inputs.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from engine_service.kernels.activation import silu_mul_ref
from engine_service.kernels.cute_dsl import keep_compiled
from engine_service.kernels.jit import in_one_line
from engine_service.kernels.waves import Block, count_waves, filled
from engine_service.out_of_memory import is_out_of_memory

_LOG = logging.getLogger("tidemill.rank")

_HOPPER = 9
_LEAST_ROWS = 24
"""Of fewer the library is as fast."""
_HALF, _FULL, _LEAST_OF_FULL = 64, 128, 96
"""Rows of tiles; of no more rows reading the weights is most. With fewer than the last a tile of
128 rows loses to the library."""
MANY_ROWS = 512
"""Of more the device draws all the power there is, and its clock settles by what a tile needs."""
_START_OUTPUTS, _LOW_START = 8, 29
"""What a tile takes beside its outputs, in outputs; and one of half as many rows."""
_SHARED, _ALONE = 1.06, 1.04
"""How much longer a tile takes that two warp groups share; and, where a multiprocessor has one tile
only, one that one of them computes while the other has none."""
_MANY_START, _TALL_START = 26, 20
"""Of many rows: what 128 rows of a tile take beside its outputs, and of one that has 256."""

_PROBE_INPUTS, _MOST_ERROR = 192, 0.01
"""Of a product that tries a tile; one rounding to bfloat16 is 0.004 of a number."""


class GatedTile(NamedTuple):
    """What a multiprocessor computes at a time."""

    rows: int
    outputs: int
    pingpong: bool
    """Whether two warp groups take turns, one multiplying while the other gates and writes; else
    both share a tile."""
    cluster: tuple[int, int]
    """Tiles that load together, by rows and by outputs."""

    def __str__(self) -> str:
        return "{0} x {1} in clusters of {3[0]} x {3[1]}".format(*self)


_BELOW = (
    GatedTile(128, 192, True, (2, 1)),
    GatedTile(128, 160, True, (2, 1)),
    GatedTile(128, 128, True, (2, 1)),
)
"""Clusters that load the same weights."""
_TALL = (GatedTile(256, 192, False, (2, 1)), GatedTile(256, 160, False, (2, 1)))
"""Two warp groups multiply the same weights: fewer are moved for as many products, which takes less
power."""
_WIDE = GatedTile(128, 224, False, (2, 1))
_BESIDE = (
    GatedTile(128, 192, True, (1, 2)),
    GatedTile(128, 128, True, (1, 2)),
    GatedTile(128, 128, False, (1, 2)),
    GatedTile(128, 224, False, (1, 2)),
)
"""Clusters that load the same rows: none is half empty where the rows are those of one tile, or of
three. Of long prompts they are a third slower: each wave reads most of the weights."""
_LOW, _LEAST_LOW = GatedTile(64, 192, True, (2, 1)), 0.93
"""Twice as many of 128 rows, for outputs of which larger tiles leave a quarter of the device idle;
and the share of it that these must fill."""
_THIN, _LEAST_THIN = (
    (
        GatedTile(64, 192, True, (1, 1)),
        GatedTile(64, 96, True, (1, 1)),
        GatedTile(64, 224, False, (1, 1)),
    ),
    0.85,
)
"""Of up to as many rows; and the share of the device that they must fill."""
TILES = (*_BELOW, *_TALL, _WIDE, *_BESIDE, _LOW, *_THIN)


def gated_product(
    x_MK: torch.Tensor, weight_NK: torch.Tensor, out_MG: torch.Tensor | None = None
) -> torch.Tensor | None:
    """silu(x Wg^T) * (x Wu^T) [M, N / 2], in `out` where that is given; None where this kernel is
    not there, or not the one to take."""
    quack = open_quack(x_MK.device) if x_MK.is_cuda else None
    if quack is None or x_MK.dtype not in (torch.bfloat16, torch.float16):
        return None
    tile = choose_tile(len(x_MK), len(weight_NK), quack.num_sms)
    if tile is None:
        return None
    out_MG = x_MK.new_empty(len(x_MK), len(weight_NK) // 2) if out_MG is None else out_MG
    if not _fit(x_MK, weight_NK, out_MG):
        return None
    return out_MG if quack.multiply(tile, x_MK, weight_NK, out_MG) else None


@lru_cache(maxsize=4096)
def choose_tile(num_rows: int, out_size: int, num_sms: int) -> GatedTile | None:
    """That which takes least, of those that leave little of the device idle; None: the library's
    product and a gate take no longer. Measured on H100s from 128 to 12,288 rows, those of many rows
    each by itself until the clock had settled, and on an H200 up to 128 (docs/performance.md)."""
    if num_rows < _LEAST_ROWS:
        return None
    tiles: tuple[GatedTile, ...] = (*_TALL, *_BELOW)
    least = 0.8
    if num_rows <= _HALF:
        num_rows, tiles, least = _HALF, _THIN, _LEAST_THIN
    elif num_rows < _LEAST_OF_FULL:
        return None
    elif num_rows <= _FULL:
        num_rows, tiles, least = _FULL, (*_BESIDE, _LOW), 0.7
    elif num_rows <= MANY_ROWS:
        tiles = (*_BELOW, _WIDE, _BESIDE[0])
    judged = [(*_judge(tile, num_rows, out_size, num_sms), tile) for tile in tiles]
    filling = [
        (takes, tile)
        for takes, share, tile in judged
        if share >= (_LEAST_LOW if tile is _LOW else least)
    ]
    return min(filling, key=lambda of: of[0])[1] if filling else None


def _judge(tile: GatedTile, num_rows: int, out_size: int, num_sms: int) -> tuple[float, float]:
    """What a product takes, in outputs of one multiprocessor for 128 rows, and which share of the
    device it fills."""
    by_rows, by_outputs = tile.cluster
    cluster = Block(by_rows * tile.rows, by_outputs * tile.outputs)
    num_clusters = num_sms // (by_rows * by_outputs)
    waves = count_waves(cluster, num_rows, out_size, num_clusters)
    if num_rows > MANY_ROWS:
        takes = tile.rows / 128 * (tile.outputs + (_TALL_START if tile in _TALL else _MANY_START))
    else:
        start = _START_OUTPUTS if tile.rows == 128 else _LOW_START
        takes = tile.rows / 128 * tile.outputs + start
        if tile.pingpong == (waves == 1):
            takes *= _ALONE if tile.pingpong else _SHARED
    return waves * takes, filled(cluster, num_rows, out_size, num_clusters)


class Quack:
    """The kernel on one device."""

    def __init__(self, num_sms: int, tiles: Sequence[GatedTile] = TILES) -> None:
        """Raises ImportError, and whatever versions that do not fit raise."""
        keep_compiled()
        from quack.gemm_config import GemmConfig
        from quack.gemm_interface import gemm_gated

        self.num_sms = num_sms
        self._gemm_gated = gemm_gated
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
            for tile in tiles
        }
        self._works: dict[torch.dtype, set[GatedTile]] = {}

    def multiply(
        self, tile: GatedTile, x_MK: torch.Tensor, weight_NK: torch.Tensor, out_MG: torch.Tensor
    ) -> bool:
        """Whether `out` is written. All tiles are tried at the first product of a number format,
        which is the engine's own at start-up: no request waits for a compiler. What fails once is
        not tried again."""
        dtype = x_MK.dtype
        if dtype not in self._works:
            if torch.cuda.is_current_stream_capturing():
                return False  # nothing compiles then
            self._works[dtype] = self._try_all(dtype, x_MK.device)
        works = self._works[dtype]
        if tile in works:
            fault = self._run(tile, x_MK, weight_NK, out_MG)
            if fault is not None:
                works.discard(tile)
                self._tell([tile], fault)
        return tile in works

    def _try_all(self, dtype: torch.dtype, device: torch.device) -> set[GatedTile]:
        """Those that work. What is wrong with several is told once."""
        by_fault: dict[str | None, list[GatedTile]] = {}
        for tile in self._configs:
            by_fault.setdefault(self._try(tile, dtype, device), []).append(tile)
        works = by_fault.pop(None, [])
        for fault, tiles in by_fault.items():
            self._tell(tiles, fault)
        return set(works)

    def _try(self, tile: GatedTile, dtype: torch.dtype, device: torch.device) -> str | None:
        """What is wrong with it, by a product of a few such tiles, some of them not full."""
        draw = torch.Generator().manual_seed(0)
        rows, outputs = 2 * tile.rows + 24, 4 * tile.outputs + 16
        x_MK, weight_NK = (
            torch.randn(size, _PROBE_INPUTS, generator=draw).to(device, dtype)
            for size in (rows, outputs)
        )
        weight_NK *= _PROBE_INPUTS**-0.5
        got_MG = x_MK.new_full((rows, outputs // 2), torch.nan)
        fault = self._run(tile, x_MK, weight_NK, got_MG)
        if fault is not None:
            return fault
        want_MG = silu_mul_ref(x_MK.float() @ weight_NK.float().t())
        error = float((got_MG.float() - want_MG).abs().max() / want_MG.abs().max())
        is_right = error <= _MOST_ERROR
        return None if is_right else f"it computes wrong numbers (error {error:.3g})"

    def _run(
        self, tile: GatedTile, x_MK: torch.Tensor, weight_NK: torch.Tensor, out_MG: torch.Tensor
    ) -> str | None:
        """What failed, if anything did."""
        try:
            self._gemm_gated(
                x_MK,
                weight_NK.t(),
                activation="swiglu",
                postact_out=out_MG,
                store_preact=False,
                concat_layout=("B",),
                config=self._configs[tile],
            )
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return in_one_line(error)
        return None

    def _tell(self, tiles: Sequence[GatedTile], fault: str | None) -> None:
        named = ", ".join(map(str, tiles))
        _LOG.warning(
            "QuACK's gated product is off for tiles of %s, the library multiplies: %s", named, fault
        )


@lru_cache(maxsize=64)
def open_quack(device: torch.device) -> Quack | None:
    """None on other devices than Hopper's, where it is not installed, and, with a warning, where it
    is but does not load."""
    if torch.cuda.get_device_capability(device)[0] != _HOPPER:
        return None
    try:
        return Quack(torch.cuda.get_device_properties(device).multi_processor_count)
    except Exception as error:  # its compiler is patched as it loads, and versions must fit
        if not (isinstance(error, ImportError) and error.name == "quack"):
            _LOG.warning("QuACK does not load, the library multiplies: %s", in_one_line(error))
        return None


def _fit(x_MK: torch.Tensor, weight_NK: torch.Tensor, out_MG: torch.Tensor) -> bool:
    """Whether the kernel, which loads and stores 16 bytes at a time, reads and writes them as they
    lie."""
    tensors = (x_MK, weight_NK, out_MG)
    (rows, inputs), outputs = x_MK.shape, len(weight_NK)
    if weight_NK.shape[1] != inputs or out_MG.shape != (rows, outputs // 2):
        return False
    one_kind = len({(one.dtype, one.device) for one in tensors}) == 1
    in_eights = all(not one.shape[1] % 8 for one in tensors)
    return (
        one_kind
        and in_eights
        and all(one.is_contiguous() and not one.data_ptr() % 16 for one in tensors)
    )
