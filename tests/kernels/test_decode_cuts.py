"""Attention of few queries whose warps see keys of their own, and programs that start by span."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from engine_service.core.step import FULL, Span
from engine_service.kernels.paged_tiles import Tiles
from tests.kernels.test_paged_attention import close, problem, ragged

SHARED = Tiles(16, 32, 2, 2)
APART = replace(SHARED, apart=True)
FOUR = Tiles(16, 64, 4, 3, apart=True, span_first=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [40, 128])
@pytest.mark.parametrize(("window", "num_splits"), [(None, 1), (None, 3), (21, 1), (150, 4)])
def test_warps_apart(
    window: int | None, num_splits: int, head_dim: int, dtype: torch.dtype, seed: int
) -> None:
    step = problem(
        ragged(seed, 8, 700, count=3),
        seed,
        heads=(2, 1),
        head_dim=head_dim,
        page_size=64,
        dtype=dtype,
        window=window,
    )
    want = step.want()
    for tiles in (APART, FOUR):
        close(step.short(num_splits, tiles, repeats=2), want)


@pytest.mark.parametrize("tiles", [SHARED, APART, FOUR])
@pytest.mark.parametrize("heads", [(4, 2), (6, 2), (16, 1)])
def test_one_query_each(heads: tuple[int, int], tiles: Tiles, seed: int) -> None:
    """Of spans that end anywhere in a tile, and see nothing of most of it."""
    draw = random.Random(seed)
    spans = [
        Span(row, start, start + 1, start + draw.choice([1, 40]), draw.choice([1, 32, FULL]), 0, 0)
        for row, start in enumerate((0, 63, 64, 290, draw.randint(500, 900)))
    ]
    step = problem(spans, seed, heads=heads, page_size=64, dtype=torch.bfloat16)
    want = step.want()
    for num_splits in (1, 2, 5):
        close(step.short(num_splits, tiles, repeats=2), want)


@pytest.mark.parametrize("num_splits", [1, 3])
def test_the_order_of_programs_is_no_matter(num_splits: int, seed: int) -> None:
    step = problem(ragged(seed, 4, 900, count=4), seed, heads=(6, 2), page_size=64)
    by_head = step.short(num_splits, SHARED)
    close(by_head, step.want())
    assert torch.equal(step.short(num_splits, replace(SHARED, span_first=True)), by_head)


def test_tiles_that_cross_pages_are_refused(seed: int) -> None:
    step = problem(ragged(seed, 2, 90, count=1), seed, page_size=24, dtype=torch.bfloat16)
    with pytest.raises(AssertionError):
        step.short(1, APART)


@pytest.mark.parametrize("cut", [{"apart": True}, {"span_first": True}, {"registers": 128}])
def test_prompts_have_no_such_cuts(cut: dict[str, int], seed: int) -> None:
    step = problem(ragged(seed, 8, 90, count=1), seed, page_size=64, dtype=torch.bfloat16)
    close(step.long(SHARED), step.want())
    with pytest.raises(AssertionError, match="few queries only"):
        step.long(replace(SHARED, **cut))
