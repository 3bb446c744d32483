"""Lines of a page table, which learns what is late on the way."""

import pytest
import torch

from engine_service.kernels.page_lines import page_lines, page_lines_ref, page_lines_triton

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WAYS = (page_lines, page_lines_ref, page_lines_triton)


@pytest.mark.parametrize("num_spans", [1, 7])
@pytest.mark.parametrize(("width", "num_pages"), [(1, 1), (20, 13), (2300, 2300), (2300, 1025)])
def test_lines_are_those_of_rows_with_what_is_late(
    num_spans: int, width: int, num_pages: int, seed: int
) -> None:
    torch.manual_seed(seed)
    table = torch.randint(0, 1000, (9, width), dtype=torch.int32)
    rows = torch.randperm(9)[:num_spans]
    late = torch.randint(-2, width, (num_spans,), dtype=torch.int32)
    late[0] = num_pages - 1
    pages = torch.randint(1000, 2000, (num_spans,), dtype=torch.int32)
    after = table.clone()
    for row, entry, page in zip(rows.tolist(), late.tolist(), pages.tolist(), strict=True):
        if entry >= 0:
            after[row, entry] = page
    for way in WAYS:
        own = table.clone().to(DEVICE)
        lines = way(own, rows.to(DEVICE), late.to(DEVICE), pages.to(DEVICE), num_pages)
        assert torch.equal(lines.cpu(), after[rows, :num_pages])
        assert torch.equal(own.cpu(), after)
        assert not torch.equal(lines.cpu(), table[rows, :num_pages])


@pytest.mark.parametrize("way", WAYS)
def test_a_row_that_comes_twice_learns_once(way: object) -> None:
    """So do spans that pad: all of them are of one row, and tell nothing."""
    table = torch.arange(12, dtype=torch.int32, device=DEVICE).view(3, 4)
    rows = torch.tensor([1, 1, 2, 2], device=DEVICE)
    late = torch.tensor([3, 3, -1, -2], dtype=torch.int32, device=DEVICE)
    pages = torch.tensor([70, 70, 5, 6], dtype=torch.int32, device=DEVICE)
    assert callable(way)
    lines = way(table, rows, late, pages, 4)
    assert lines.tolist() == [[4, 5, 6, 70], [4, 5, 6, 70], [8, 9, 10, 11], [8, 9, 10, 11]]
    assert table.tolist() == [[0, 1, 2, 3], [4, 5, 6, 70], [8, 9, 10, 11]]
