"""How the paged kernels are cut: tiles that fit, by rows and programs, and splits that pay."""

from __future__ import annotations

from functools import partial
from itertools import product

import torch

from engine_service.kernels import jit
from engine_service.kernels.paged_attention import long_tiles
from engine_service.kernels.paged_decode import count_splits, most_rows, short_rows, short_tiles
from engine_service.kernels.paged_tiles import Tiles

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def test_tiles_fit_their_kernels() -> None:
    for head_dim, dtype in product((32, 64, 128, 192, 256), DTYPES):
        for rows in (16, 32, 64, 128):
            for num_programs in (1, 384, 1024):
                tiles = short_tiles(rows, head_dim, dtype, num_programs)
                assert tiles.block_m == rows
                staged = (rows + 2 * tiles.num_stages * tiles.block_n) * max(head_dim, 16)
                assert staged * dtype.itemsize < 200_000
        tiles = long_tiles(head_dim, dtype)
        staged = (tiles.block_m + 2 * tiles.num_stages * tiles.block_n) * head_dim
        assert staged * dtype.itemsize < 200_000


def test_devices_with_less_shared_memory_get_the_tiles_that_fit_it() -> None:
    """All others are those of compute capability 9.0."""
    wide, small, half = torch.float32, jit.shared_of((8, 9)), torch.bfloat16
    cut = {
        (head_dim, dtype, rows): short_tiles(rows, head_dim, dtype, shared=small)
        for head_dim, dtype, rows in product((64, 128, 192, 256), DTYPES, (16, 32, 64, 128))
        if rows <= most_rows(head_dim, dtype, small)
    }
    assert (256, wide, 128) not in cut
    other = {of: tiles for of, tiles in cut.items() if tiles != short_tiles(of[2], *of[:2])}
    assert other == {
        (64, wide, 128): Tiles(128, 16, 8, 2),
        (128, wide, 128): Tiles(128, 16, 8, 2),
        **dict.fromkeys([(192, wide, 64), (256, wide, 64)], Tiles(64, 16, 8, 1)),
        **dict.fromkeys(product((192, 256), DTYPES[1:], (128,)), Tiles(128, 16, 8, 2)),
    }
    assert long_tiles(256, wide, small) == Tiles(32, 16, 4, 2)
    assert long_tiles(192, half, small) == Tiles(64, 32, 4, 2)
    assert long_tiles(128, half, small) == long_tiles(128, half) == Tiles(128, 64, 8, 3)
    assert long_tiles(256, half) == Tiles(128, 32, 8, 2)


def test_128_rows_of_wide_heads_in_float32_fit_the_most_shared_memory_alone() -> None:
    rooms = [jit.shared_of(of) for of in ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))]
    assert [most_rows(256, torch.float32, room) for room in rooms] == [64, 64, 64, 128, 128, 64]
    assert {most_rows(128, torch.float32, room) for room in rooms} == {128}
    assert {most_rows(256, torch.float16, room) for room in rooms} == {128}
    assert [short_rows(16, 8, most) for most in (64, 128)] == [None, 128]


def test_small_tiles_are_for_many_programs_of_few_keys() -> None:
    """A program with many keys, as another one's span may have, would take longer by them."""

    def cut(rows: int, programs: int, keys: int | None) -> int:
        return short_tiles(rows, 128, torch.bfloat16, programs, keys).block_n

    assert cut(32, 512, 384) == cut(32, 1024, 208) == 16
    assert [cut(32, 1024, 385), cut(32, 1024, None)] == [64, 64]
    assert [cut(32, 256, 208), cut(64, 1024, 208)] == [64, 64]


def test_rows_of_short_queries() -> None:
    assert [short_rows(*pair) for pair in ((1, 1), (1, 8), (4, 4), (4, 5), (32, 4))] == [
        16,
        16,
        16,
        32,
        128,
    ]
    assert short_rows(33, 4) is None


def test_splits_fill_the_device_and_stay_worth_it() -> None:
    one_query = partial(count_splits, block_m=16, num_sms=132)
    assert one_query(1, 8, 300) == 1
    assert one_query(1, 8, 2000) == 7
    assert one_query(1, 8, 100_000) == 16
    assert one_query(8, 8, 16_384) == 6
    assert one_query(256, 8, 4096) == 1


def test_larger_tiles_are_split_less_often() -> None:
    """Sixteen blocks of 16, 32 and more queries: fewer of their programs run at once."""
    splits = [count_splits(16, 8, 4096, block_m=rows, num_sms=132) for rows in (16, 32, 64, 128)]
    assert splits == [3, 2, 2, 1]
    assert count_splits(1, 8, 1024, block_m=128, num_sms=132) == 4
    assert count_splits(200, 8, 4096, block_m=128, num_sms=132) == 1
