"""Every operator equals the plain formula beside it, over number formats and odd shapes."""

import pytest
import torch

from engine_service.kernels.activation import silu_mul, silu_mul_ref
from engine_service.kernels.norm import add_rms_norm, add_rms_norm_ref, rms_norm, rms_norm_ref
from engine_service.kernels.rotary import rotate, rotate_ref
from engine_service.kernels.store_kv import store_kv, store_kv_ref
from engine_service.kernels.weighted_rows import weighted_rows, weighted_rows_ref

FORMATS = [
    (torch.float64, 1e-12),
    (torch.float32, 1e-5),
    (torch.bfloat16, 2e-2),
    (torch.float16, 2e-3),
]
formats = pytest.mark.parametrize(("dtype", "tolerance"), FORMATS, ids=lambda value: str(value))


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> None:
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@formats
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 4, 33)])
@pytest.mark.parametrize("weighted", [True, False])
def test_rms_norm(
    dtype: torch.dtype, tolerance: float, shape: tuple[int, ...], weighted: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    x = (torch.randn(shape, dtype=torch.float64) * 3).to(dtype)
    weight = torch.randn(shape[-1]).to(dtype) if weighted else None
    close(rms_norm(x, weight, 1e-6), rms_norm_ref(x, weight, 1e-6), tolerance)


def test_half_formats_round_before_the_weight(seed: int) -> None:
    """The published models were trained so; rounding once at the end gives other bits."""
    torch.manual_seed(seed)
    x, weight = torch.randn(64, 128).bfloat16(), torch.randn(128).bfloat16()
    assert torch.equal(rms_norm(x, weight, 1e-6), rms_norm_ref(x, weight, 1e-6))
    once = torch.nn.functional.rms_norm(x.float(), (128,), weight.float(), 1e-6).bfloat16()
    assert not torch.equal(once, rms_norm_ref(x, weight, 1e-6))


@formats
def test_add_rms_norm(dtype: torch.dtype, tolerance: float, seed: int) -> None:
    torch.manual_seed(seed)
    x, residual = (torch.randn(5, 24).to(dtype) for _ in range(2))
    weight = torch.randn(24).to(dtype)
    want = add_rms_norm_ref(x, residual, weight, 1e-5)
    for got, expected in zip(add_rms_norm(x, residual.clone(), weight, 1e-5), want, strict=True):
        close(got, expected, tolerance)


@formats
@pytest.mark.parametrize("head_dim", [2, 10, 64])
def test_rotate(dtype: torch.dtype, tolerance: float, head_dim: int, seed: int) -> None:
    torch.manual_seed(seed)
    x = torch.randn(6, 3, head_dim).to(dtype)
    angles = torch.randn(6, head_dim // 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    want = rotate_ref(x, torch.cat((cos, cos), -1), torch.cat((sin, sin), -1))
    tables = torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]
    close(rotate(x, *tables), want, 2 * tolerance)


@formats
@pytest.mark.parametrize("size", [1, 5, 64])
def test_silu_mul(dtype: torch.dtype, tolerance: float, size: int, seed: int) -> None:
    torch.manual_seed(seed)
    x = torch.randn(4, 2 * size).to(dtype)
    kept = x.clone()
    close(silu_mul(x), silu_mul_ref(x), 2 * tolerance)
    assert torch.equal(x, kept)


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


@pytest.mark.parametrize(("dtype", "tolerance"), FORMATS[:2], ids=str)
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
