"""Normalisation equals its formula, over number formats, widths and strides of rows."""

from collections.abc import Callable

import pytest
import torch

from engine_service.kernels.norm import (
    add_rms_norm,
    add_rms_norm_ref,
    add_rms_norm_triton,
    rms_norm,
    rms_norm_ref,
    rms_norm_triton,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FORMATS = [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)]
formats = pytest.mark.parametrize(("dtype", "tolerance"), FORMATS, ids=str)
all_formats = pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), *FORMATS], ids=str
)
WIDTHS = [1, 7, 64, 192, 300, 1024, 5120]

Norm = Callable[[torch.Tensor, torch.Tensor | None, float], torch.Tensor]


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> None:
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def normal(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64).to(DEVICE, dtype)


@all_formats
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 4, 33)])
@pytest.mark.parametrize("weighted", [True, False])
def test_rms_norm(
    dtype: torch.dtype, tolerance: float, shape: tuple[int, ...], weighted: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    x = normal(*shape, dtype=dtype) * 3
    weight = normal(shape[-1], dtype=dtype) if weighted else None
    close(rms_norm(x, weight, 1e-6), rms_norm_ref(x, weight, 1e-6), tolerance)


@formats
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("weighted", [True, False])
def test_the_kernel_over_widths(
    dtype: torch.dtype, tolerance: float, width: int, weighted: bool, seed: int
) -> None:
    """Rows lie apart, as columns of a wider product do."""
    torch.manual_seed(seed)
    wide = normal(3, width + 9, dtype=dtype)
    x, kept = wide[:, 1 : width + 1], wide.clone()
    weight = normal(width, dtype=dtype) if weighted else None
    got = rms_norm_triton(x, weight, 1e-6)
    close(got, rms_norm_ref(x, weight, 1e-6), tolerance)
    assert got.is_contiguous()
    assert torch.equal(wide, kept)
    if width > 1:
        assert not torch.allclose(got, rms_norm_ref(wide[:, :width], weight, 1e-6), atol=tolerance)


@pytest.mark.parametrize("norm", [rms_norm, rms_norm_triton])
def test_half_formats_round_before_the_weight(norm: Norm, seed: int) -> None:
    """The published models were trained so; rounding once at the end gives other bits. The sum of
    a row may differ in its last bit, which moves few of them."""
    torch.manual_seed(seed)
    x, weight = normal(8, 256, dtype=torch.float16), normal(256, dtype=torch.float16)
    want = rms_norm_ref(x, weight, 1e-6)
    once = rms_norm_ref(x.float(), weight.float(), 1e-6).half()
    assert (norm(x, weight, 1e-6) == want).float().mean() > 0.99
    assert (once == want).float().mean() < 0.9


@pytest.mark.parametrize("norm", [rms_norm, rms_norm_triton])
def test_epsilon_stands_beside_the_mean_square(norm: Norm) -> None:
    x = torch.tensor([[0.0, 0.0], [3e-3, -3e-3]], device=DEVICE)
    want = torch.tensor([[0.0, 0.0], [0.6, -0.6]], device=DEVICE)
    close(norm(x, None, 1.6e-5), want, 1e-5)
    assert not torch.allclose(norm(x, None, 1e-6), want, atol=0.1)


@all_formats
def test_add_rms_norm(dtype: torch.dtype, tolerance: float, seed: int) -> None:
    torch.manual_seed(seed)
    x, residual, weight = (normal(*shape, dtype=dtype) for shape in ((5, 24), (5, 24), (24,)))
    want = add_rms_norm_ref(x, residual, weight, 1e-5)
    for got, expected in zip(add_rms_norm(x, residual.clone(), weight, 1e-5), want, strict=True):
        close(got, expected, tolerance)


@formats
@pytest.mark.parametrize("width", WIDTHS)
def test_the_adding_kernel_over_widths(
    dtype: torch.dtype, tolerance: float, width: int, seed: int
) -> None:
    torch.manual_seed(seed)
    x, weight = normal(3, width, dtype=dtype), normal(width, dtype=dtype)
    wide = normal(3, width + 9, dtype=dtype)
    residual, beside = wide[:, :width], wide[:, width:].clone()
    want, want_total = add_rms_norm_ref(x, residual, weight, 1e-5)
    got, total = add_rms_norm_triton(x, residual, weight, 1e-5)
    assert total is residual
    close(total, want_total, tolerance)
    close(got, want, 2 * tolerance)
    assert torch.equal(wide[:, width:], beside)


def test_statistics_are_those_of_the_rounded_sum(seed: int) -> None:
    torch.manual_seed(seed)
    x, residual = (normal(8, 256, dtype=torch.float16) for _ in "xr")
    one = torch.ones(256, device=DEVICE, dtype=torch.float16)
    want, total = add_rms_norm_ref(x, residual, one, 1e-6)
    unrounded = rms_norm_ref(x.float() + residual.float(), None, 1e-6).half()
    got, _ = add_rms_norm_triton(x, residual, one, 1e-6)
    assert torch.equal(residual, total)
    assert (got == want).float().mean() > 0.99
    assert (unrounded == want).float().mean() < 0.9


def test_a_row_does_not_depend_on_the_others(seed: int) -> None:
    """The same bits, alone and among many: what a request gets is not a matter of its company."""
    torch.manual_seed(seed)
    x, weight = normal(9, 1536, dtype=torch.bfloat16), normal(1536, dtype=torch.bfloat16)
    alone = [rms_norm_triton(row[None], weight, 1e-6) for row in x]
    assert torch.equal(rms_norm_triton(x, weight, 1e-6), torch.cat(alone))


@pytest.mark.gpu
def test_launches_in_a_graph_wait_for_each_other(seed: int) -> None:
    """Overlapped launches that did not wait would read a residual that is half written."""
    torch.manual_seed(seed)
    x, residual, weight = (
        normal(*shape, dtype=torch.float32) for shape in ((512, 4096), (512, 4096), (4096,))
    )

    def chain(add: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        y, total = x, residual.clone()
        for _ in range(40):
            y, total = add(y, total, weight, 1e-6)
        return total

    chain(add_rms_norm)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chain(add_rms_norm)
    for _ in range(20):
        graph.replay()
    close(got, chain(add_rms_norm_ref), 1e-3)
