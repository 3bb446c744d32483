"""How well the tiles of a product fill a device, which computes them in waves: one a multiprocessor
at a time. It knows no kernels."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Tile(Protocol):
    """What a multiprocessor computes at a time, of a product's rows and outputs."""

    @property
    def rows(self) -> int: ...

    @property
    def outputs(self) -> int: ...


class Block(NamedTuple):
    """A tile, or several that are computed together, by size alone."""

    rows: int
    outputs: int


def count_tiles(tile: Tile, num_rows: int, out_size: int) -> int:
    """Of a product."""
    return -(-out_size // tile.outputs) * -(-num_rows // tile.rows)


def count_waves(tile: Tile, num_rows: int, out_size: int, num_sms: int) -> int:
    """Of a product, on a device that computes `num_sms` tiles at a time."""
    return -(-count_tiles(tile, num_rows, out_size) // num_sms)


def filled(tile: Tile, num_rows: int, out_size: int, num_sms: int) -> float:
    """Which share of what the device could compute in that many waves is wanted."""
    waves = count_waves(tile, num_rows, out_size, num_sms)
    return num_rows * out_size / (waves * num_sms * tile.outputs * tile.rows)
