"""bfloat16 rows times a float32 weight are as exact as float32 products, over sizes."""

from __future__ import annotations

import pytest
import torch

from engine_service.kernels.wide_linear import wide_linear_ref, wide_linear_triton

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def error(got: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> float:
    """Largest difference from float64, as a part of the sums of what is added."""
    want = x.double() @ weight.double().T
    size = x.double().abs() @ weight.double().abs().T
    return float(((got.double() - want).abs() / size.clamp(min=1e-30)).max())


@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 5, 3), (70, 130, 200), (64, 64, 512)])
def test_as_exact_as_float32(rows: int, outputs: int, inputs: int, seed: int) -> None:
    """Weights over many powers of two; rows that are parts of wider ones."""
    torch.manual_seed(seed)
    x = torch.randn(rows, inputs + 7, device=DEVICE).bfloat16()[:, :inputs]
    weight = torch.randn(outputs, inputs, device=DEVICE)
    weight *= 2.0 ** torch.randint(-12, 3, (outputs, inputs), device=DEVICE)
    got = wide_linear_triton(x, weight)
    assert got.dtype is torch.float32
    assert error(got, x, weight) < 1e-6
    assert error(wide_linear_ref(x, weight), x, weight) < 1e-6
    rounded = wide_linear_triton(x, weight.bfloat16().float())
    assert error(rounded, x, weight) > 1e-5, "the control: one part of the weight is not enough"


def test_whole_numbers_are_exact(seed: int) -> None:
    """24 bits of the weight count, and every output has its own."""
    torch.manual_seed(seed)
    x = torch.zeros(9, 40, device=DEVICE)
    x[torch.arange(9), torch.randperm(40)[:9]] = 1.0
    weight = torch.randint(-(1 << 24), 1 << 24, (11, 40), device=DEVICE).float()
    want = x @ weight.T
    assert torch.equal(wide_linear_triton(x.bfloat16(), weight), want)
    assert not torch.equal(wide_linear_triton(x.bfloat16(), weight + 2), want), "the control"
