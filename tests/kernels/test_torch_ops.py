"""Operators that are torch alone equal the plain formula beside them, over odd shapes."""

import pytest
import torch

from engine_service.kernels.store_kv import store_kv, store_kv_ref
from engine_service.kernels.weighted_rows import weighted_rows, weighted_rows_ref

FORMATS = [(torch.float64, 1e-12), (torch.float32, 1e-5)]


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> None:
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("head_major", [True, False])
def test_store_kv(page_size: int, head_major: bool, seed: int) -> None:
    torch.manual_seed(seed)
    size = (7, 2, page_size, 3) if head_major else (7, page_size, 2, 3)
    pages = torch.zeros(size)
    pages = pages.transpose(1, 2) if head_major else pages
    want = torch.zeros(7, page_size, 2, 3)
    x = torch.randn(5, 2, 3)
    slots = torch.randperm(7 * page_size)[:5]
    store_kv_ref(want, x, slots)
    store_kv(pages, x, slots // page_size, slots % page_size)
    assert torch.equal(pages, want)


@pytest.mark.parametrize(("dtype", "tolerance"), FORMATS, ids=str)
@pytest.mark.parametrize("size", [(1, 1, 1), (5, 3, 8), (7, 130, 33)])
def test_weighted_rows(
    dtype: torch.dtype, tolerance: float, size: tuple[int, int, int], seed: int
) -> None:
    """Rows may be named often, and a row of another bag does not matter, whatever it holds."""
    torch.manual_seed(seed)
    bags, length, width = size
    rows = torch.randn(20, width).to(dtype)
    rows[19] = float("nan")
    index = torch.randint(0, 19, (bags, length))
    weights = torch.rand(bags, length).to(dtype)
    want = weighted_rows_ref(rows, index, weights)
    close(weighted_rows(rows, index, weights), want, tolerance)
    assert not torch.allclose(weighted_rows(rows, index, weights + 1), want)
