"""What it is worth to have the gate inside of its product: gate and up of a layer by the library
with a gate behind it, by QuACK's kernel with the tile that `choose_tile` names, and by its others.

    python -m benchmarks.gated_products [--shape qwen3-8b] [--ranks 1] [--rows 128,512,2048,8192]

Of few rows medians over rounds in which all take turns, on a card that is warm; of many each runs
by itself until the clock has settled. Random weights, bfloat16, as many as the caches cannot hold.
Needs a GPU of compute capability 9 and `tidemill[flash]`.
"""

from __future__ import annotations

import argparse
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
    choose_tile,
    open_quack,
)
from engine_service.kernels.library_linear import library_linear

_NUM_WEIGHTS = 3


def measure(num_rows: int, out_size: int, in_size: int, tiles: Sequence[GatedTile]) -> list[float]:
    """Microseconds of the library's product alone, with the gate behind it, and by each tile."""
    like = {"dtype": torch.bfloat16, "device": torch.device("cuda")}
    weights = [torch.randn(out_size, in_size, **like) * 0.02 for _ in range(_NUM_WEIGHTS)]
    x, y = torch.randn(num_rows, in_size, **like), torch.empty(num_rows, out_size, **like)
    out = torch.empty(num_rows, out_size // 2, **like)
    quack = open_quack(x.device)
    assert quack is not None, "QuACK is not installed, or this is no Hopper"

    def library(at: int) -> torch.Tensor:
        return library_linear(x, weights[at], out=y)

    def by(tile: GatedTile, at: int) -> None:
        if not quack.multiply(tile, x, weights[at], out):
            raise RuntimeError(f"tiles of {tile} do not work here")

    runs = [library, lambda at: silu_mul(library(at), out), *(partial(by, tile) for tile in tiles)]
    guess_us = max(2 * out_size * in_size / 4e6, 2 * num_rows * out_size * in_size / 7e8)
    timed = alone if num_rows > MANY_ROWS else in_turn
    return timed([capture(run, _NUM_WEIGHTS) for run in runs], _NUM_WEIGHTS, guess_us)


@torch.inference_mode()
def main(argv: Sequence[str] | None = None) -> None:
    """Prints a line a number of rows."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gated_products")
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--ranks", type=int, default=1, help="that share the inner width")
    parser.add_argument("--rows", default="128,256,512,1024,2048,8192")
    said = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.exit(2, "benchmarks.gated_products needs a CUDA device\n")
    shape, num_sms = SHAPES[said.shape], torch.cuda.get_device_properties().multi_processor_count
    out_size = 2 * shape.inner // said.ranks
    print("  rows  library  and gate     QuACK    gain   by tile (* chosen)")
    for num_rows in map(int, said.rows.split(",")):
        alone, both, *by_tile = measure(num_rows, out_size, shape.hidden, TILES)
        chosen = choose_tile(num_rows, out_size, num_sms)
        told = " ".join(
            f"{_short(tile)}{'*' * (tile == chosen)} {us:.1f}"
            for tile, us in zip(TILES, by_tile, strict=True)
        )
        own = both if chosen is None else by_tile[TILES.index(chosen)]
        line = f"{num_rows:6d} {alone:8.1f} {both:9.1f} {own:9.1f} {both / own:7.3f}"
        print(line, told, sep="   ", flush=True)


def _short(tile: GatedTile) -> str:
    return f"{tile.rows}x{tile.outputs}/{tile.cluster[0]}{tile.cluster[1]}"


if __name__ == "__main__":
    main()
