"""How the paged kernels are cut: tiles that fit, by rows and programs, and splits that pay."""

from __future__ import annotations

from functools import partial
from itertools import product

import torch

from engine_service.kernels.paged_attention import long_tiles
from engine_service.kernels.paged_decode import count_splits, short_rows, short_tiles

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
