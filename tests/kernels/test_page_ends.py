"""Values behind the last key of a span."""

import pytest
import torch

from engine_service.kernels.page_ends import (
    clear_page_ends,
    clear_page_ends_ref,
    clear_page_ends_triton,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WAYS = (clear_page_ends, clear_page_ends_ref, clear_page_ends_triton)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3)])
@pytest.mark.parametrize(("heads", "head_dim"), [(1, 16), (3, 40), (8, 128)])
@pytest.mark.parametrize("way", WAYS)
def test_nothing_but_the_ends_is_cleared(
    way: object, heads: int, head_dim: int, order: tuple[int, ...], seed: int
) -> None:
    torch.manual_seed(seed)
    page_size, lengths = 16, [1, 15, 16, 17, 32, 47]
    size = (24, page_size, heads, head_dim)
    values = torch.full([size[axis] for axis in order], torch.nan).permute(
        [order.index(axis) for axis in range(4)]
    )
    table = torch.randperm(24)[: len(lengths) * 3].to(torch.int32).view(-1, 3)
    want = values.clone()
    for pages, length in zip(table.tolist(), lengths, strict=True):
        for slot in range(length, -(-length // page_size) * page_size):
            want[pages[slot // page_size], slot % page_size] = 0
    own = values.to(DEVICE, torch.bfloat16)
    assert own.stride() == values.stride()
    assert callable(way)
    way(own, table.to(DEVICE), torch.tensor(lengths, dtype=torch.int32, device=DEVICE))
    torch.testing.assert_close(own.cpu().float(), want, equal_nan=True)
    assert want.isnan().any()
    assert (want == 0).sum() == (15 + 1 + 15 + 1) * heads * head_dim
