"""What ranks hold of whole pages: all of it in all, each value once, and in its place."""

from __future__ import annotations

import pytest
import torch

from engine_service.worker.page_shares import PageFormat, bytes_of, cut, join, shares_of

NUM_LAYERS, PAGE, HEAD = 5, 3, 2
GRIDS = [
    (num_stages * size, num_stages, num_heads)
    for num_stages in (1, 2, 3, 5)
    for size, num_heads in ((1, 3), (2, 4), (4, 4), (2, 1), (4, 2), (6, 2))
]
"""Ranks, stages, heads: shares of several heads, of one, and the same one for some ranks."""


def make(num_heads: int) -> tuple[PageFormat, torch.Tensor]:
    """Two pages in which no value comes twice."""
    form = PageFormat((NUM_LAYERS, 2, PAGE, num_heads, HEAD), torch.float32)
    whole = form.empty(2)
    return form, whole.copy_(torch.arange(whole.numel()).view(whole.shape))


@pytest.mark.parametrize(("num_ranks", "num_stages", "num_heads"), GRIDS)
def test_shares_make_up_the_whole(num_ranks: int, num_stages: int, num_heads: int) -> None:
    form, whole = make(num_heads)
    shares = shares_of(num_ranks, num_stages, NUM_LAYERS, num_heads)
    holders = [share for share in shares if not share.is_copy]
    parts = [bytearray(bytes_of(cut(whole, share).contiguous())) for share in holders]
    assert sum(map(len, parts)) == 2 * form.page_bytes
    found = form.empty(2).fill_(-1)
    join(found, holders, parts)
    assert torch.equal(found, whole)
    assert torch.equal(form.opened(bytearray(bytes_of(whole))), whole)


@pytest.mark.parametrize(("num_ranks", "num_stages", "num_heads"), GRIDS)
def test_a_rank_has_its_stage_and_its_heads(
    num_ranks: int, num_stages: int, num_heads: int
) -> None:
    """Said once more in plain words: ranks of a stage follow each other, and so do heads."""
    size = num_ranks // num_stages
    seen = set()
    for rank, share in enumerate(shares_of(num_ranks, num_stages, NUM_LAYERS, num_heads)):
        stage, number = divmod(rank, size)
        before = [-(-index * NUM_LAYERS // num_stages) for index in (stage, stage + 1)]
        assert share.layers == range(*before)
        heads = [head for head in range(num_heads) if head * size // num_heads == number]
        assert list(share.heads) == (heads if size <= num_heads else [number * num_heads // size])
        held = share.layers, share.heads
        assert share.is_copy == (held in seen)
        seen.add(held)


def test_a_share_of_another_size_is_refused() -> None:
    form, whole = make(4)
    first, second = shares_of(2, 1, NUM_LAYERS, 4)
    parts = [bytearray(bytes_of(cut(whole, first).contiguous())), bytearray(4)]
    with pytest.raises(RuntimeError, match="shape"):
        join(form.empty(2), [first, second], parts)
