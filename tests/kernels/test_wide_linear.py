"""bfloat16 rows times a float32 weight are as exact as float32 products, over sizes."""

from __future__ import annotations

import pytest
import torch

from engine_service.kernels import wide_linear
from engine_service.kernels.wide_linear import (
    WideWeight,
    split_weight,
    wide_linear_ref,
    wide_linear_triton,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

SIZES = [
    (1, 5, 3),
    (70, 130, 200),
    (64, 64, 512),
    (1030, 500, 70),
    (90, 70, 2048),
    (33, 65, 1500),
    (2, 8, 4096),
]
"""Rows, outputs, inputs; the fourth in tiles of 64 rows, the last three share sums."""


def error(got: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> float:
    """Largest difference from float64, as a part of the sums of what is added."""
    want = x.double() @ weight.double().T
    size = x.double().abs() @ weight.double().abs().T
    return float(((got.double() - want).abs() / size.clamp(min=1e-30)).max())


@pytest.mark.parametrize(("rows", "outputs", "inputs"), SIZES)
def test_as_exact_as_float32(rows: int, outputs: int, inputs: int, seed: int) -> None:
    """Weights over many powers of two; rows that are parts of wider ones."""
    torch.manual_seed(seed)
    x = torch.randn(rows, inputs + 7, device=DEVICE).bfloat16()[:, :inputs]
    weight = torch.randn(outputs, inputs, device=DEVICE)
    weight *= 2.0 ** torch.randint(-12, 3, (outputs, inputs), device=DEVICE)
    got = wide_linear_triton(x, split_weight(weight))
    assert got.dtype is torch.float32
    assert error(got, x, weight) < 1e-6
    assert error(wide_linear_ref(x, weight), x, weight) < 1e-6
    rounded = wide_linear_triton(x, split_weight(weight.bfloat16().float()))
    assert error(rounded, x, weight) > 1e-5, "the control: one part of the weight is not enough"


def test_whole_numbers_are_exact(seed: int) -> None:
    """24 bits of the weight count, and every output has its own."""
    torch.manual_seed(seed)
    x = torch.zeros(9, 40, device=DEVICE)
    x[torch.arange(9), torch.randperm(40)[:9]] = 1.0
    weight = torch.randint(-(1 << 24), 1 << 24, (11, 40), device=DEVICE).float()
    want = x @ weight.T
    assert torch.equal(wide_linear_triton(x.bfloat16(), split_weight(weight)), want)
    other = split_weight(weight + 2)
    assert not torch.equal(wide_linear_triton(x.bfloat16(), other), want), "the control"


def test_three_pieces_are_the_weight(seed: int) -> None:
    """Bit for bit, over many powers of two; two of them, the control, are not."""
    torch.manual_seed(seed)
    weight = torch.randn(40, 30) * 2.0 ** torch.randint(-60, 60, (40, 30))
    high, middle, low = split_weight(weight).double()
    assert torch.equal(high + middle + low, weight.double())
    assert not torch.equal(high + middle, weight.double())


@pytest.mark.parametrize(
    ("rows", "dtype", "by_kernel"),
    [(3, torch.bfloat16, True), (0, torch.bfloat16, False), (64, torch.float32, False)],
)
def test_rows_take_the_pieces_of_a_weight_that_is_split(
    monkeypatch: pytest.MonkeyPatch, rows: int, dtype: torch.dtype, by_kernel: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    monkeypatch.setattr(wide_linear, "runs_triton", lambda _: True)
    asked: list[int] = []

    def counted(x: torch.Tensor, pieces: torch.Tensor) -> torch.Tensor:
        asked.append(len(x))
        return wide_linear_triton(x, pieces)

    monkeypatch.setattr(wide_linear, "wide_linear_triton", counted)
    x = torch.randn(rows, 40, device=DEVICE).to(dtype)
    weight = WideWeight(torch.empty(70, 40, device=DEVICE))
    weight.weight_OI.normal_()  # filled behind what holds it, as a checkpoint does
    torch.testing.assert_close(weight.product(x), wide_linear_ref(x, weight.weight_OI))
    assert asked == [], "nothing is split yet"
    weight.split(dtype)
    torch.testing.assert_close(weight.product(x), wide_linear_ref(x, weight.weight_OI))
    assert asked == ([rows] if by_kernel else [])
