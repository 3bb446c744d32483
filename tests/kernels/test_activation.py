"""The gated activation equals its formula, over number formats, widths and strides of rows."""

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from engine_service.kernels.activation import silu_mul, silu_mul_ref, silu_mul_triton

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FORMATS = [(torch.float32, 1e-5), (torch.bfloat16, 4e-2), (torch.float16, 4e-3)]
formats = pytest.mark.parametrize(("dtype", "tolerance"), FORMATS, ids=str)
all_formats = pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), *FORMATS], ids=str
)


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> None:
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@all_formats
@pytest.mark.parametrize("size", [1, 5, 64])
def test_silu_mul(dtype: torch.dtype, tolerance: float, size: int, seed: int) -> None:
    torch.manual_seed(seed)
    x = torch.randn(4, 2 * size).to(DEVICE, dtype)
    kept = x.clone()
    close(silu_mul(x), silu_mul_ref(x), tolerance)
    assert torch.equal(x, kept)


@formats
@pytest.mark.parametrize("size", [1, 7, 192, 1024, 1500, 4864])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_the_kernel_over_widths(
    dtype: torch.dtype, tolerance: float, size: int, num_rows: int, seed: int
) -> None:
    """Rows lie apart; halves that change places give something else."""
    torch.manual_seed(seed)
    wide = torch.randn(num_rows, 2 * size + 5).to(DEVICE, dtype) * 3
    x = wide[:, 1 : 2 * size + 1]
    got = silu_mul_triton(x)
    close(got, silu_mul_ref(x), tolerance)
    assert got.is_contiguous()
    if size > 1:
        assert not torch.allclose(got, silu_mul_ref(x.roll(size, dims=-1)), atol=tolerance)


def test_many_rows(seed: int) -> None:
    torch.manual_seed(seed)
    x = torch.randn(300, 2 * 30).to(DEVICE)
    close(silu_mul_triton(x), silu_mul_ref(x), 1e-5)


@pytest.mark.parametrize("activate", [silu_mul, silu_mul_triton])
def test_both_roundings_of_half_formats(
    activate: Callable[[torch.Tensor], torch.Tensor], seed: int
) -> None:
    """silu is rounded, then the product: other bits than one rounding gives."""
    torch.manual_seed(seed)
    x = torch.randn(16, 256).to(DEVICE, torch.float16)
    gate, up = x.chunk(2, dim=-1)
    want = functional.silu(gate) * up
    once = silu_mul_ref(x.float()).half()
    assert (activate(x) == want).float().mean() > 0.99
    assert (once == want).float().mean() < 0.9


@pytest.mark.filterwarnings("ignore:overflow")  # the interpreter's, where exp is infinite
def test_far_ends() -> None:
    """A gate far below zero shuts, far above it passes; nothing becomes NaN."""
    gate = torch.tensor([[-3e4, -200.0, -88.0, 0.0, 88.0, 200.0, 3e4]], device=DEVICE)
    x = torch.cat((gate, torch.ones_like(gate)), dim=-1)
    close(silu_mul_triton(x), gate.clamp(min=0), 1e-6)
