"""A product with its norm, gate and sum, and which of the library's kernels it takes."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch.nn import functional

from engine_service.kernels import library_linear as library
from engine_service.kernels.activation import silu_mul_ref
from engine_service.kernels.cublaslt import Cut, open_library
from engine_service.kernels.library_linear import choose_cut, library_linear
from engine_service.kernels.linear import linear
from engine_service.kernels.norm import rms_norm_ref

H200 = 132


def drawn(seed: int) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(seed)
    return torch.randn(5, 24), torch.randn(16, 24), torch.randn(16), torch.randn(5, 16)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("where", ["new", "out", "residual", "gated", "gated out"])
def test_what_stands_around_a_product(seed: int, where: str, has_bias: bool) -> None:
    x, weight, bias, other = drawn(seed)
    norm = (torch.randn(24), 1e-5)
    own_bias = bias if has_bias else None
    want = functional.linear(rms_norm_ref(x, *norm), weight, own_bias)
    gated = where.startswith("gated")
    if gated:
        room = torch.empty(5, 8) if where == "gated out" else None
        got = linear(x, weight, own_bias, norm=norm, gated=True, out=room)
        want = silu_mul_ref(want)
        assert room is None or got is room
    elif where == "residual":
        want = other + want
        got = linear(x, weight, own_bias, norm=norm, residual=other)
        assert got is other
    elif where == "out":
        got = linear(x, weight, own_bias, norm=norm, out=other)
        assert got is other
    else:
        got = linear(x, weight, own_bias, norm=norm)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    plain = linear(x, weight, own_bias, gated=gated)
    assert not torch.allclose(plain, got), "a norm that is left out is seen"


def test_a_product_that_is_chosen_computes_and_one_that_refuses_does_not(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way to a chosen kernel, without a device: it is asked on CUDA tensors only."""
    x, weight, _, residual = drawn(seed)
    asked: list[bool] = []

    class OnCuda(torch.Tensor):
        is_cuda = True

    def product(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *, adds: bool) -> bool:
        asked.append(adds)
        out.fill_(7.0)
        return is_able

    monkeypatch.setattr(library, "_product_of", lambda x, weight: product)
    on_device = x.as_subclass(OnCuda)
    for is_able, adds in itertools.product((True, False), (True, False)):
        target = residual.clone()
        got = library_linear(on_device, weight, residual=target) if adds else None
        got = library_linear(on_device, weight) if got is None else got
        assert asked.pop() is adds
        assert bool((got == 7.0).all()) is is_able
    assert not asked
    library_linear(on_device, weight, torch.zeros(16))
    library_linear(x, weight)
    library_linear(on_device, weight, out=torch.zeros(5, 32)[:, ::2])
    assert not asked, "a bias, the CPU, and what does not lie in one piece are the library's"
    for wrong in (torch.zeros(4, 16), torch.zeros(5, 24), torch.zeros(5, 16, dtype=torch.float64)):
        with pytest.raises(RuntimeError):
            library_linear(on_device, weight, residual=wrong)
    with pytest.raises(RuntimeError):
        library_linear(on_device, weight[:, :16].contiguous())
    assert not asked, "nor is an address given away of what does not fit"


@pytest.mark.parametrize(
    ("rows", "outputs", "cut"),
    [
        (32, 4096, (64, 16)),
        (64, 4096, (64, 32)),
        (96, 4096, (128, 32)),
        (128, 4096, (64, 64)),
        (256, 4096, (64, 128)),
        (64, 5120, (64, 64)),
        (256, 5120, (96, 128)),
        (128, 24576, (192, 64)),
        (256, 24576, (128, 128)),
        (300, 4096, None),
        (8192, 24576, None),
        (16, 1024, None),
        (32, 24576, None),
        (256, 151936, None),
    ],
)
def test_the_measured_table(rows: int, outputs: int, cut: tuple[int, int] | None) -> None:
    """docs/performance.md, "The library's kernels by name"."""
    found = choose_cut(rows, outputs, H200)
    assert (None if found is None else (found.outputs, found.rows)) == cut


def test_a_cut_fills_the_device(seed: int) -> None:
    """Whatever the sizes: one wave of few rows, or waves of which hardly anything is idle."""
    rng = random.Random(seed)
    chosen = 0
    for _ in range(3000):
        rows, outputs = rng.randrange(1, 300), 8 * rng.randrange(8, rng.choice((640, 4000)))
        cut = choose_cut(rows, outputs, H200)
        if cut is None:
            continue
        chosen += 1
        tiles = -(-outputs // cut.outputs) * -(-rows // cut.rows)
        waves = -(-tiles // H200)
        filled = rows * outputs / (waves * H200 * cut.outputs * cut.rows)
        is_narrow = rows <= 256 and outputs <= 5120
        assert waves == 1 or not is_narrow
        assert filled >= (0.45 if is_narrow else 0.93)
        assert rows <= 256
    assert 600 < chosen < 2400


def test_there_is_no_such_library_for_a_cpu() -> None:
    assert open_library(torch.device("cpu")) is None


def test_every_cut_has_a_kernel() -> None:
    from engine_service.kernels.cublaslt import _TILES

    cuts: set[Cut] = {*library._ONE_WAVE, *library._WAVES}
    assert {(cut.outputs, cut.rows) for cut in cuts} == set(_TILES)
