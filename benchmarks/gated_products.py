"""What it is worth to have the gate inside of its product: gate and up of a layer by the library
with a gate behind it, by QuACK's kernel with the tile that `choose_tile` names, and by its others.

    python -m benchmarks.gated_products [--shape qwen3-8b] [--ranks 1] [--rows 128,512,2048,8192]
        [--tiles 64x192p21,128x128c12]

Of few rows medians over rounds in which all take turns, on a card that is warm; of many each runs
by itself until the clock has settled. Random weights, bfloat16, as many as the caches cannot hold.
Needs a GPU of compute capability 9 and `tidemill[flash]`.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from functools import partial

import torch

from benchmarks.decode_layer import SHAPES
from benchmarks.library_products import alone, capture, in_turn
from engine_service.kernels.activation import silu_mul
from engine_service.kernels.gated_product import (
    MANY_ROWS,
    TILES,
    GatedTile,
    Quack,
    choose_tile,
)
from engine_service.kernels.library_linear import library_linear

_NUM_WEIGHTS = 3
_TILE = re.compile(r"(\d+)x(\d+)([pc])(\d)(\d)")


def measure(
    num_rows: int, out_size: int, in_size: int, tiles: Sequence[GatedTile], quack: Quack
) -> list[float]:
    """Microseconds of the library's product alone, with the gate behind it, and by each tile."""
    like = {"dtype": torch.bfloat16, "device": torch.device("cuda")}
    weights = [torch.randn(out_size, in_size, **like) * 0.02 for _ in range(_NUM_WEIGHTS)]
    x, y = torch.randn(num_rows, in_size, **like), torch.empty(num_rows, out_size, **like)
    out = torch.empty(num_rows, out_size // 2, **like)

    def library(at: int) -> torch.Tensor:
        return library_linear(x, weights[at], out=y)

    def by(tile: GatedTile, at: int) -> None:
        quack.multiply(tile, x, weights[at], out)

    runs = [library, lambda at: silu_mul(library(at), out), *(partial(by, tile) for tile in tiles)]
    guess_us = max(2 * out_size * in_size / 4e6, 2 * num_rows * out_size * in_size / 7e8)
    timed = alone if num_rows > MANY_ROWS else in_turn
    return timed([capture(run, _NUM_WEIGHTS) for run in runs], _NUM_WEIGHTS, guess_us)


def working(quack: Quack, tiles: Sequence[GatedTile]) -> list[GatedTile]:
    """Those that the kernel has and computes right with; it says which it refuses."""
    x, weight, out = (
        torch.zeros(size, dtype=torch.bfloat16, device="cuda")
        for size in ((128, 64), (256, 64), (128, 128))
    )
    return [tile for tile in tiles if quack.multiply(tile, x, weight, out)]


@torch.inference_mode()
def main(argv: Sequence[str] | None = None) -> None:
    """Prints a line a number of rows."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gated_products")
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--ranks", type=int, default=1, help="that share the inner width")
    parser.add_argument("--rows", default="128,256,512,1024,2048,8192")
    parser.add_argument("--tiles", type=_tiles, default=TILES, help="others than are chosen from")
    said = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.exit(2, "benchmarks.gated_products needs a CUDA device\n")
    shape, num_sms = SHAPES[said.shape], torch.cuda.get_device_properties().multi_processor_count
    out_size = 2 * shape.inner // said.ranks
    quack = Quack(num_sms, said.tiles)
    tiles = working(quack, said.tiles)
    print("  rows  library  and gate     QuACK    gain   by tile (* chosen)")
    for num_rows in map(int, said.rows.split(",")):
        alone, both, *by_tile = measure(num_rows, out_size, shape.hidden, tiles, quack)
        chosen = choose_tile(num_rows, out_size, num_sms)
        told = " ".join(
            f"{_short(tile)}{'*' * (tile == chosen)} {us:.1f}"
            for us, tile in sorted(zip(by_tile, tiles, strict=True))
        )
        own = by_tile[tiles.index(chosen)] if chosen in tiles else both
        line = f"{num_rows:6d} {alone:8.1f} {both:9.1f} {own:9.1f} {both / own:7.3f}"
        print(line, told, sep="   ", flush=True)


def _tiles(said: str) -> tuple[GatedTile, ...]:
    """Rows x outputs, p where two warp groups take turns and c where they share, the cluster."""
    tiles = []
    for each in said.split(","):
        found = _TILE.fullmatch(each)
        if found is None:
            raise argparse.ArgumentTypeError(f"{each!r} is not like 64x192p21")
        rows, outputs, way, high, wide = found.groups()
        tiles.append(GatedTile(int(rows), int(outputs), way == "p", (int(high), int(wide))))
    return tuple(tiles)


def _short(tile: GatedTile) -> str:
    way = "p" if tile.pingpong else "c"
    return f"{tile.rows}x{tile.outputs}{way}{tile.cluster[0]}{tile.cluster[1]}"


if __name__ == "__main__":
    main()
