"""The grouped backend equals the span-by-span reference, and the reference its mask rule."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine_service.attention.base import AttentionShape
from engine_service.attention.pieces import (
    MAX_MASK,
    MAX_QUERIES,
    Piece,
    cut_spans,
    group_pieces,
    read_spans,
)
from engine_service.attention.reference import visible_keys
from engine_service.attention.select import create_backend
from engine_service.core.step import FULL, Span
from tests.models.paged import PageTable, attend_steps, causal, random_steps

HEADS, KV_HEADS, HEAD_DIM = 6, 2, 8


def shape(page_size: int, dtype: torch.dtype = torch.float64) -> AttentionShape:
    return AttentionShape(
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        page_size=page_size,
        dtype=dtype,
    )


def attend(
    name: str,
    table: PageTable,
    steps: list[list[Span]],
    window: int | None,
    *,
    on_host: bool = True,
    dtype: torch.dtype = torch.float64,
) -> list[torch.Tensor]:
    backend = create_backend(name, shape(table.page_size, dtype))
    return attend_steps(backend, table, steps, window, on_host=on_host)


@given(
    seed=st.integers(0, 2**20),
    page_size=st.sampled_from([1, 2, 4, 16]),
    window=st.sampled_from([None, None, 1, 5, 40]),
    on_host=st.booleans(),
)
def test_sdpa_equals_reference(
    seed: int,
    page_size: int,
    window: int | None,
    on_host: bool,
) -> None:
    steps = random_steps(random.Random(seed), 4, 96)
    table = PageTable(4, 96, page_size, seed)
    want = attend("reference", table, steps, window)
    got = attend("sdpa", table, steps, window, on_host=on_host)
    for left, right in zip(got, want, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("rule", ["window", "mask_block", "kv_len"])
def test_a_broken_rule_shows(rule: str, seed: int) -> None:
    """Negative control: each clause of the mask rule changes the output."""
    table = PageTable(1, 32, 4, seed)
    first = causal(0, 0, 16, 4)
    right, wrong, windows = causal(0, 16, 24, 4), causal(0, 16, 24, 4), (None, None)
    if rule == "window":
        windows = (None, 7)
    elif rule == "mask_block":
        wrong = right._replace(mask_block=1)
    else:
        wrong = right._replace(kv_len=20)
    want, got = (
        attend("sdpa", table, [[first], [span]], window)[1]
        for span, window in zip((right, wrong), windows, strict=True)
    )
    assert (got - want).abs().max() > 1e-3


def test_long_and_ragged_spans_are_cut_and_grouped(seed: int) -> None:
    """A prompt longer than a piece, beside rows that decode and rows of very unlike lengths."""
    table = PageTable(5, 1100, 16, seed)
    steps = [
        [causal(row, 0, stop) for row, stop in enumerate((1, 40, 300, 700, 30))],
        [causal(row, start, start + 1) for row, start in enumerate((1, 40, 300, 700))]
        + [causal(4, 30, 30 + 2 * MAX_QUERIES + 5)],
    ]
    for window in (None, 64):
        want = attend("reference", table, steps, window)
        for left, right in zip(attend("sdpa", table, steps, window), want, strict=True):
            torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_other_number_formats(dtype: torch.dtype, tolerance: float, seed: int) -> None:
    steps = random_steps(random.Random(seed), 3, 64)
    table = PageTable(3, 64, 4, seed)
    want = attend("reference", table, steps, None)
    for left, right in zip(attend("sdpa", table, steps, None, dtype=dtype), want, strict=True):
        torch.testing.assert_close(left.double(), right, rtol=tolerance, atol=tolerance)


@given(
    position=st.integers(0, 60),
    kv_len=st.integers(1, 64),
    block=st.sampled_from([1, 3, 4, FULL]),
    window=st.sampled_from([None, 1, 6]),
)
def test_mask_rule(position: int, kv_len: int, block: int, window: int | None) -> None:
    seen = visible_keys(torch.tensor([position]), kv_len, block, window, num_keys=64)[0]
    for key in range(64):
        want = key < min(kv_len, (position // block + 1) * block)
        want = want and (window is None or key > position - window)
        assert bool(seen[key]) == want, key


def test_spans_read_back_are_those_on_the_host(seed: int) -> None:
    spans = [causal(2, 5, 9, 4), causal(0, 0, 1), causal(1, 16, 24, 8)]
    read = read_spans(PageTable(3, 32, 4, seed).batch(spans))
    facts = [(span.start, span.stop, span.kv_len, span.mask_block) for span in spans]
    assert [(span.start, span.stop, span.kv_len, span.mask_block) for span in read] == facts


def test_pieces_hold_every_key_a_query_may_see() -> None:
    spans = [causal(0, 100, 100 + 2 * MAX_QUERIES + 3), causal(1, 8, 16, 8)]
    assert cut_spans(spans, page_size=16, window=None) == [
        Piece(0, 0, MAX_QUERIES, 0, 100 + MAX_QUERIES),
        Piece(0, MAX_QUERIES, MAX_QUERIES, 0, 100 + 2 * MAX_QUERIES),
        Piece(0, 2 * MAX_QUERIES, 3, 0, 100 + 2 * MAX_QUERIES + 3),
        Piece(1, 2 * MAX_QUERIES + 3, 8, 0, 16),
    ]
    windowed = cut_spans([causal(0, 100, 101)], page_size=16, window=10)
    assert windowed == [Piece(0, 0, 1, 80, 101)]


def test_groups_share_length_and_width_and_bound_the_mask() -> None:
    decode = [Piece(row, row, 1, 0, kv) for row, kv in enumerate((3, 200, 256, 257, 5000, 500))]
    groups = group_pieces(decode, group_size=4)
    assert [[piece.kv_stop for piece in group] for group in groups] == [
        [3, 200, 256],
        [257, 500],
        [5000],
    ]
    long = [Piece(row, row, MAX_QUERIES, 0, 1 << 13) for row in range(9)]
    sizes = [len(group) for group in group_pieces(long, group_size=4)]
    assert sum(sizes) == 9
    assert max(sizes) * MAX_QUERIES * 4 * (1 << 13) <= MAX_MASK
